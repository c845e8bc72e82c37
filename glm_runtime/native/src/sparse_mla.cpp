// Absorbed attention over a list of cached rows per query row. Contract: ops/sparse_mla/reference.py.
//
// A row's list is compacted (padding disappears), cut into pieces of kPieceKeys and those into tiles of kTileKeys. A tile is decoded
// once for all heads. Inside a piece the softmax runs online over its tiles; pieces are merged in order. Who computes a piece, and
// what else is computed, does not enter: a row's bits depend on its own list alone.
#include "scratch.hpp"
#include "tiles.hpp"

#ifdef GLM_SUPPORTED
#include <cfloat>
#include <omp.h>

namespace {
using namespace glm;

constexpr int64_t kTileKeys = 64;
constexpr int64_t kPieceKeys = 256;

struct Call {
    const void* queries;
    bool are_queries_bf16;
    int64_t rows, heads, width, latent;
    const uint8_t* cached;
    int64_t unit_bytes, row_bytes;
    RowKind kind;
    const int64_t* addresses;
    int64_t list_width;
    float scale;
    float* attended;
    float* lse;

    int64_t padded_heads() const { return round_up(heads, 4); }
    int64_t padded_latent() const { return round_up(latent, 64); }
    int64_t padded_width() const { return larger(round_up(width, 32), padded_latent()); }
    int64_t partial_floats() const { return padded_heads() * (padded_latent() + 1 + kLanes); }
};

// What one piece of a list gives: the unnormalised sum [heads, latent], the highest logit and the lanes of the total, by head.
struct Partial {
    float *sum, *highest, *total;
    Partial(const Call& call, float* memory)
        : sum(memory), highest(memory + call.padded_heads() * call.padded_latent()), total(highest + call.padded_heads()) {}
};

template <class Number>
struct Work {
    Number *queries, *keys;
    float *logits, *factors;
    uint32_t *weight_pairs, *key_pairs;

    static int64_t bytes(const Call& call) {
        const int64_t heads = call.padded_heads(), width = call.padded_width();
        return (heads + kTileKeys) * width * int64_t(sizeof(Number)) + heads * (kTileKeys + kLanes) * 4 + heads * kTileKeys * 2 +
               kTileKeys / 2 * call.padded_latent() * 4;
    }
    Work(const Call& call, uint8_t* memory) {
        const int64_t heads = call.padded_heads(), width = call.padded_width();
        queries = reinterpret_cast<Number*>(memory);
        keys = queries + heads * width;
        logits = reinterpret_cast<float*>(keys + kTileKeys * width);
        factors = logits + heads * kTileKeys;
        weight_pairs = reinterpret_cast<uint32_t*>(factors + heads * kLanes);
        key_pairs = weight_pairs + heads * kTileKeys / 2;
        std::memset(static_cast<void*>(queries), 0, size_t(heads + kTileKeys) * width * sizeof(Number));
    }
};

inline void convert(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * 4); }
inline void convert(const bf16* from, int64_t count, bf16* to) { std::memcpy(to, from, size_t(count) * 2); }
inline void convert(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
inline void convert(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = narrow(from[i]);
}

template <class Number>
void load_queries(const Call& call, int64_t row, const Work<Number>& work) {
    for (int64_t head = 0; head < call.heads; ++head) {
        const int64_t first = (row * call.heads + head) * call.width;
        Number* to = work.queries + head * call.padded_width();
        if (call.are_queries_bf16)
            convert(static_cast<const bf16*>(call.queries) + first, call.width, to);
        else
            convert(static_cast<const float*>(call.queries) + first, call.width, to);
    }
}

// Decoded rows of a tile; rows up to a multiple of 4 are zero, so that no product meets what was there before.
template <class Number>
void load_keys(const Call& call, const int64_t* listed, int64_t count, const Work<Number>& work) {
    const int64_t width = call.padded_width();
    for (int64_t key = 0; key < count; ++key)
        decode_row(call.kind, call.cached + listed[key] * call.unit_bytes, nullptr, call.width, work.keys + key * width);
    const int64_t end = round_up(count, 4);
    if (end > count) std::memset(static_cast<void*>(work.keys + count * width), 0, size_t(end - count) * width * sizeof(Number));
}

// Rows lie all over the pool: they are asked for while the tile before them is computed.
inline void prefetch_keys(const Call& call, const int64_t* listed, int64_t count) {
    for (int64_t key = 0; key < count; ++key)
        for (int64_t byte = 0; byte < call.row_bytes; byte += 64)
            _mm_prefetch(reinterpret_cast<const char*>(call.cached + listed[key] * call.unit_bytes + byte), _MM_HINT_T1);
}

template <class Number>
void score_tile(const Call& call, int64_t count, const Work<Number>& work) {
    const int64_t width = call.padded_width(), used = round_up(call.width, 32);
    for (int64_t key = 0; key < count; key += 4)
        for (int64_t head = 0; head < call.padded_heads(); head += 4) {
            const vec dots = dots_4x4(work.queries + head * width, width, work.keys + key * width, width, used);
            float* to = work.logits + head * kTileKeys + key;
            _mm_storeu_ps(to, _mm512_castps512_ps128(dots));
            _mm_storeu_ps(to + kTileKeys, _mm512_extractf32x4_ps(dots, 1));
            _mm_storeu_ps(to + 2 * kTileKeys, _mm512_extractf32x4_ps(dots, 2));
            _mm_storeu_ps(to + 3 * kTileKeys, _mm512_extractf32x4_ps(dots, 3));
        }
}

// logits -> weights exp(logit - highest), in place; updates highest and total, and leaves the factor of what was summed before.
template <class Number>
void weigh_tile(const Call& call, int64_t count, bool is_first, const Work<Number>& work, const Partial& partial) {
    const vec scale = _mm512_set1_ps(call.scale), lowest = _mm512_set1_ps(-INFINITY);
    for (int64_t head = 0; head < call.padded_heads(); ++head) {
        float* logits = work.logits + head * kTileKeys;
        vec top = lowest;
        for (int64_t i = 0; i < kTileKeys; i += kLanes) {
            const __mmask16 lanes = count >= i + kLanes ? __mmask16(0xffff) : count > i ? first_lanes(count - i) : __mmask16(0);
            const vec x = _mm512_mask_mul_ps(lowest, lanes, _mm512_loadu_ps(logits + i), scale);
            _mm512_storeu_ps(logits + i, x);
            top = _mm512_max_ps(top, x);
        }
        const float before = is_first ? -FLT_MAX : partial.highest[head];
        const float tile_top = max_lanes(top), highest = tile_top > before ? tile_top : before;
        const vec factor = is_first ? _mm512_setzero_ps() : glm::exp(_mm512_set1_ps(before - highest));
        vec total = is_first ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(partial.total + head * kLanes), factor);
        for (int64_t i = 0; i < kTileKeys; i += kLanes) {
            const vec weight = glm::exp(_mm512_sub_ps(_mm512_loadu_ps(logits + i), _mm512_set1_ps(highest)));
            _mm512_storeu_ps(logits + i, weight);
            total = _mm512_add_ps(total, weight);
            if (sizeof(Number) == 2) store_bf16(reinterpret_cast<bf16*>(work.weight_pairs + head * kTileKeys / 2) + i, weight);
        }
        partial.highest[head] = highest;
        _mm512_storeu_ps(partial.total + head * kLanes, total);
        _mm512_storeu_ps(work.factors + head * kLanes, factor);
    }
}

// Keys 2 i and 2 i + 1 side by side, number by number.
void pair_keys(const Call& call, int64_t count, const Work<bf16>& work) {
    const int64_t width = call.padded_width(), latent = call.padded_latent();
    for (int64_t key = 0; key < count; key += 2)
        pair_rows(work.keys + key * width, work.keys + (key + 1) * width, latent, work.key_pairs + key / 2 * latent);
}

template <class Operand>
void sum_tile(const Call& call, const Operand* weights, int64_t weight_stride, const Operand* keys, int64_t key_stride, int64_t count,
              bool is_first, const float* factors, float* sum) {
    const int64_t latent = call.padded_latent();
    for (int64_t c = 0; c < latent; c += 64)
        for (int64_t head = 0; head < call.padded_heads(); head += 4) {
            vec sums[4][4];
            for (int i = 0; i < 4; ++i) {
                const vec factor = _mm512_loadu_ps(factors + (head + i) * kLanes);
                const float* before = sum + (head + i) * latent + c;
                for (int v = 0; v < 4; ++v)
                    sums[i][v] = is_first ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(before + kLanes * v), factor);
            }
            accumulate(sums, weights + head * weight_stride, weight_stride, keys + c, key_stride, count);
            for (int i = 0; i < 4; ++i)
                for (int v = 0; v < 4; ++v) _mm512_storeu_ps(sum + (head + i) * latent + c + kLanes * v, sums[i][v]);
        }
}

void sum_tile(const Call& call, int64_t count, bool is_first, const Work<float>& work, const Partial& partial) {
    sum_tile(call, work.logits, kTileKeys, work.keys, call.padded_width(), count, is_first, work.factors, partial.sum);
}

void sum_tile(const Call& call, int64_t count, bool is_first, const Work<bf16>& work, const Partial& partial) {
    pair_keys(call, count, work);
    sum_tile(call, work.weight_pairs, kTileKeys / 2, work.key_pairs, call.padded_latent(), round_up(count, 2) / 2, is_first,
             work.factors, partial.sum);
}

template <class Number>
void attend_piece(const Call& call, const int64_t* listed, int64_t count, const Work<Number>& work, const Partial& partial) {
    for (int64_t first = 0; first < count; first += kTileKeys) {
        const int64_t keys = smaller(kTileKeys, count - first);
        load_keys(call, listed + first, keys, work);
        if (first + kTileKeys < count) prefetch_keys(call, listed + first + kTileKeys, smaller(kTileKeys, count - first - kTileKeys));
        score_tile(call, keys, work);
        weigh_tile(call, keys, first == 0, work, partial);
        sum_tile(call, keys, first == 0, work, partial);
    }
}

// into = into + from, each weighed by its highest logit.
void merge(const Call& call, const Partial& into, const Partial& from) {
    const int64_t latent = call.padded_latent();
    for (int64_t head = 0; head < call.heads; ++head) {
        const float a = into.highest[head], b = from.highest[head], highest = a > b ? a : b;
        const vec of_into = glm::exp(_mm512_set1_ps(a - highest)), of_from = glm::exp(_mm512_set1_ps(b - highest));
        const auto add = [&](float* x, const float* y) {
            _mm512_storeu_ps(x, _mm512_fmadd_ps(_mm512_loadu_ps(y), of_from, _mm512_mul_ps(_mm512_loadu_ps(x), of_into)));
        };
        into.highest[head] = highest;
        add(into.total + head * kLanes, from.total + head * kLanes);
        for (int64_t c = 0; c < latent; c += kLanes) add(into.sum + head * latent + c, from.sum + head * latent + c);
    }
}

void finish(const Call& call, int64_t row, const Partial* whole) {
    for (int64_t head = 0; head < call.heads; ++head) {
        float* to = call.attended + (row * call.heads + head) * call.latent;
        float& lse = call.lse[row * call.heads + head];
        if (whole == nullptr) {
            std::memset(to, 0, size_t(call.latent) * 4);
            lse = -INFINITY;
            continue;
        }
        const float total = sum_lanes(_mm512_loadu_ps(whole->total + head * kLanes));
        const float* sum = whole->sum + head * call.padded_latent();
        const vec divisor = _mm512_set1_ps(total);
        for (int64_t c = 0; c < call.latent; c += kLanes) {
            const __mmask16 lanes = first_lanes(smaller(kLanes, call.latent - c));
            _mm512_mask_storeu_ps(to + c, lanes, _mm512_div_ps(_mm512_loadu_ps(sum + c), divisor));
        }
        lse = whole->highest[head] + std::log(total);
    }
}

// Listed addresses without padding, in order. Returns how many.
int64_t compact(const Call& call, int64_t row, int64_t* listed) {
    int64_t count = 0;
    for (int64_t i = 0; i < call.list_width; ++i) {
        const int64_t address = call.addresses[row * call.list_width + i];
        if (address >= 0) listed[count++] = address;
    }
    return count;
}

int64_t num_pieces(int64_t count) { return (count + kPieceKeys - 1) / kPieceKeys; }

// Many rows: each by one thread, piece after piece.
template <class Number>
void attend_rows(const Call& call) {
#pragma omp parallel
    {
        thread_local Scratch work_memory, list_memory, sum_memory;
        const Work<Number> work(call, work_memory.take<uint8_t>(Work<Number>::bytes(call)));
        int64_t* listed = list_memory.take<int64_t>(call.list_width);
        float* sums = sum_memory.take<float>(2 * call.partial_floats());
        const Partial whole(call, sums), piece(call, sums + call.partial_floats());
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < call.rows; ++row) {
            const int64_t count = compact(call, row, listed);
            load_queries(call, row, work);
            for (int64_t first = 0; first < count; first += kPieceKeys) {
                attend_piece(call, listed + first, smaller(kPieceKeys, count - first), work, first ? piece : whole);
                if (first) merge(call, whole, piece);
            }
            finish(call, row, count ? &whole : nullptr);
        }
    }
}

// Few rows: each piece by one thread, merged when all are there.
template <class Number>
void attend_pieces(const Call& call) {
    thread_local Scratch list_memory, sum_memory, count_memory;
    const int64_t most = num_pieces(call.list_width), floats = call.partial_floats();
    int64_t* listed = list_memory.take<int64_t>(call.rows * call.list_width);
    int64_t* counts = count_memory.take<int64_t>(call.rows);
    float* sums = sum_memory.take<float>(call.rows * most * floats);
    for (int64_t row = 0; row < call.rows; ++row) counts[row] = compact(call, row, listed + row * call.list_width);
#pragma omp parallel
    {
        thread_local Scratch work_memory;
        const Work<Number> work(call, work_memory.take<uint8_t>(Work<Number>::bytes(call)));
        int64_t loaded = -1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call.rows * most; ++item) {
            const int64_t row = item / most, first = item % most * kPieceKeys;
            if (first >= counts[row]) continue;
            if (loaded != row) load_queries(call, row, work);
            loaded = row;
            const Partial piece(call, sums + item * floats);
            attend_piece(call, listed + row * call.list_width + first, smaller(kPieceKeys, counts[row] - first), work, piece);
        }
#pragma omp for
        for (int64_t row = 0; row < call.rows; ++row) {
            const Partial whole(call, sums + row * most * floats);
            for (int64_t piece = 1; piece < num_pieces(counts[row]); ++piece)
                merge(call, whole, Partial(call, sums + (row * most + piece) * floats));
            finish(call, row, counts[row] ? &whole : nullptr);
        }
    }
}

template <class Number>
void attend(const Call& call) {
    if (call.rows < 2 * omp_get_max_threads())
        attend_pieces<Number>(call);
    else
        attend_rows<Number>(call);
}

}  // namespace

// queries [rows, heads, width] fp32 or bf16; cached + address * unit_bytes is a row; addresses [rows, list_width], -1 is nothing.
// uses_bf16: products of bf16 numbers (queries and weights are rounded), else of fp32. attended [rows, heads, latent], lse [rows, heads].
extern "C" void glm_sparse_mla(const void* queries, int64_t are_queries_bf16, int64_t rows, int64_t heads, int64_t width, int64_t latent,
                               const void* cached, int64_t unit_bytes, int64_t row_bytes, int64_t kind, const int64_t* addresses,
                               int64_t list_width,
                               float scale, int64_t uses_bf16, float* attended, float* lse) {
    const Call call{queries, are_queries_bf16 != 0, rows, heads, width, latent, static_cast<const uint8_t*>(cached), unit_bytes,
                    row_bytes, RowKind(kind), addresses, list_width, scale, attended, lse};
    if (uses_bf16)
        attend<bf16>(call);
    else
        attend<float>(call);
}
#endif
