// Absorbed attention over a list of cached rows per query row. Contract: ops/sparse_mla/reference.py.
//
// A row's list is compacted (padding disappears), cut into pieces of kPieceKeys and those into tiles of kTileKeys. A tile is decoded
// once for all heads. Inside a piece the softmax runs online over its tiles; pieces are merged in order. Who computes a piece, and
// what else is computed, does not enter: a row's bits depend on its own list alone. A thread knows or guesses what it will
// compute next, so that the first tile of that is asked for in time.
#include "scratch.hpp"
#include "tiles.hpp"

#ifdef GLM_SUPPORTED
#include <atomic>
#include <cfloat>
#include <omp.h>
#include <vector>

namespace {
using namespace glm;

constexpr int64_t kTileKeys = 64;
constexpr int64_t kPieceKeys = 256;
constexpr int64_t kSumColumns = 64;  // of a head, whose sums stay in registers while the keys of a tile pass by

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
    int64_t padded_latent() const { return round_up(latent, kSumColumns); }
    int64_t padded_width() const { return larger(round_up(width, 32), padded_latent()); }
    int64_t partial_floats() const { return padded_heads() * (padded_latent() + 1 + kLanes); }
};

// What one piece of a list gives: the unnormalised sum [heads, latent], the highest logit and the lanes of the total, by head.
struct Partial {
    float *sum, *highest, *total;
    Partial(const Call& call, float* memory)
        : sum(memory), highest(memory + call.padded_heads() * call.padded_latent()), total(highest + call.padded_heads()) {}
};

// What a thread computes in. keys: fp32 keeps the rows of a tile, because they are summed as they are; bf16 keeps the four that are
// scored, and the tile as key_pairs.
template <class Number>
struct Work {
    static constexpr bool has_pairs = sizeof(Number) == 2;
    static constexpr int64_t kRowsKept = has_pairs ? 4 : kTileKeys;
    Number *queries, *keys;
    float *logits, *factors;
    uint32_t *weight_pairs, *key_pairs;

    static int64_t bytes(const Call& call) {
        const int64_t heads = call.padded_heads(), width = call.padded_width();
        return (heads + kRowsKept) * width * int64_t(sizeof(Number)) + heads * (kTileKeys + kLanes) * 4 + heads * kTileKeys * 2 +
               kTileKeys / 2 * call.padded_latent() * 4;
    }
    Work(const Call& call, uint8_t* memory) {
        const int64_t heads = call.padded_heads(), width = call.padded_width();
        queries = reinterpret_cast<Number*>(memory);
        keys = queries + heads * width;
        logits = reinterpret_cast<float*>(keys + kRowsKept * width);
        factors = logits + heads * kTileKeys;
        weight_pairs = reinterpret_cast<uint32_t*>(factors + heads * kLanes);
        key_pairs = weight_pairs + heads * kTileKeys / 2;
        std::memset(static_cast<void*>(queries), 0, size_t(heads + kRowsKept) * width * sizeof(Number));
    }
    Number* row_of(const Call& call, int64_t key) const { return keys + key % kRowsKept * call.padded_width(); }
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

// Listed rows: of a tile, of a piece.
struct Keys {
    const int64_t* listed;
    int64_t count;
};

// Rows lie all over the pool: those of the next tile are asked for while this one is computed. A few at a time, and while what is
// computed lies in the first-level cache: what comes from the second level waits behind all that was asked for.
class Ahead {
  public:
    Ahead(const Call& call, Keys keys) : call_(call), keys_(keys) {}
    void ask(int64_t count) {
        for (const int64_t end = smaller(next_ + count, keys_.count); next_ < end; ++next_)
            for (int64_t byte = 0; byte < call_.row_bytes; byte += 64)
                _mm_prefetch(reinterpret_cast<const char*>(call_.cached + keys_.listed[next_] * call_.unit_bytes + byte), _MM_HINT_T1);
    }

  private:
    const Call& call_;
    const Keys keys_;
    int64_t next_ = 0;
};

// Keys 2 i and 2 i + 1 side by side, number by number; the columns that are summed together lie together.
void pair_keys(const Call& call, int64_t key, const bf16* even, uint32_t* key_pairs) {
    for (int64_t c = 0; c < call.padded_latent(); c += kSumColumns)
        pair_rows(even + c, even + call.padded_width() + c, kSumColumns, key_pairs + c * kTileKeys / 2 + key / 2 * kSumColumns);
}

// Rows [first, first + 4) of a tile, decoded; behind the last row is zero, so that no product meets what was there before.
template <class Number>
void load_four(const Call& call, Keys tile, int64_t first, const Work<Number>& work) {
    const int64_t width = call.padded_width(), end = smaller(first + 4, tile.count);
    for (int64_t key = first; key < end; ++key)
        decode_row(call.kind, call.cached + tile.listed[key] * call.unit_bytes, nullptr, call.width, work.row_of(call, key));
    if (end < first + 4)
        std::memset(static_cast<void*>(work.row_of(call, end)), 0, size_t(first + 4 - end) * width * sizeof(Number));
    if constexpr (Work<Number>::has_pairs)
        for (int64_t key = first; key < first + 4; key += 2) pair_keys(call, key, work.row_of(call, key), work.key_pairs);
}

template <class Number>
void score_tile(const Call& call, Keys tile, Ahead& ahead, const Work<Number>& work) {
    const int64_t width = call.padded_width(), used = round_up(call.width, 32), asked = larger(1, 16 / call.padded_heads());
    for (int64_t key = 0; key < tile.count; key += 4) {
        load_four(call, tile, key, work);
        for (int64_t head = 0; head < call.padded_heads(); head += 4) {
            ahead.ask(asked);
            const vec dots = dots_4x4(work.queries + head * width, width, work.row_of(call, key), width, used);
            float* to = work.logits + head * kTileKeys + key;
            _mm_storeu_ps(to, _mm512_castps512_ps128(dots));
            _mm_storeu_ps(to + kTileKeys, _mm512_extractf32x4_ps(dots, 1));
            _mm_storeu_ps(to + 2 * kTileKeys, _mm512_extractf32x4_ps(dots, 2));
            _mm_storeu_ps(to + 3 * kTileKeys, _mm512_extractf32x4_ps(dots, 3));
        }
    }
    ahead.ask(kTileKeys);
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

// Column c of the keys begins at keys + c * column_step.
template <class Operand>
void sum_tile(const Call& call, const Operand* weights, int64_t weight_stride, const Operand* keys, int64_t key_stride,
              int64_t column_step, int64_t count, bool is_first, const float* factors, float* sum) {
    const int64_t latent = call.padded_latent();
    for (int64_t c = 0; c < latent; c += kSumColumns) {
        for (int64_t head = 0; head < call.padded_heads(); head += 4) {
            vec sums[4][4];
            for (int i = 0; i < 4; ++i) {
                const vec factor = _mm512_loadu_ps(factors + (head + i) * kLanes);
                const float* before = sum + (head + i) * latent + c;
                for (int v = 0; v < 4; ++v)
                    sums[i][v] = is_first ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(before + kLanes * v), factor);
            }
            accumulate(sums, weights + head * weight_stride, weight_stride, keys + c * column_step, key_stride, count);
            for (int i = 0; i < 4; ++i)
                for (int v = 0; v < 4; ++v) _mm512_storeu_ps(sum + (head + i) * latent + c + kLanes * v, sums[i][v]);
        }
    }
}

void sum_tile(const Call& call, int64_t count, bool is_first, const Work<float>& work, const Partial& partial) {
    sum_tile(call, work.logits, kTileKeys, work.keys, call.padded_width(), 1, count, is_first, work.factors, partial.sum);
}

void sum_tile(const Call& call, int64_t count, bool is_first, const Work<bf16>& work, const Partial& partial) {
    const int64_t pairs = round_up(count, 2) / 2;
    sum_tile(call, work.weight_pairs, kTileKeys / 2, work.key_pairs, kSumColumns, kTileKeys / 2, pairs, is_first, work.factors, partial.sum);
}

// after: what this thread computes next, if anything.
template <class Number>
void attend_piece(const Call& call, Keys piece, Keys after, const Work<Number>& work, const Partial& partial) {
    for (int64_t first = 0; first < piece.count; first += kTileKeys) {
        const Keys tile{piece.listed + first, smaller(kTileKeys, piece.count - first)};
        const Keys rest{tile.listed + tile.count, piece.count - first - tile.count};
        const Keys next = rest.count > 0 ? rest : after;
        Ahead ahead(call, {next.listed, smaller(kTileKeys, next.count)});
        score_tile(call, tile, ahead, work);
        weigh_tile(call, tile.count, first == 0, work, partial);
        sum_tile(call, tile.count, first == 0, work, partial);
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

// Listed addresses of a row without padding, in order; of a row that is not there, none.
Keys compact(const Call& call, int64_t row, int64_t* listed) {
    int64_t count = 0;
    for (int64_t i = 0; row < call.rows && i < call.list_width; ++i) {
        const int64_t address = call.addresses[row * call.list_width + i];
        if (address >= 0) listed[count++] = address;
    }
    return {listed, count};
}

int64_t num_pieces(int64_t count) { return (count + kPieceKeys - 1) / kPieceKeys; }

// Piece by number; empty behind the last.
Keys piece_of(Keys keys, int64_t piece) {
    const int64_t first = smaller(piece * kPieceKeys, keys.count);
    return {keys.listed + first, smaller(kPieceKeys, keys.count - first)};
}

// Many rows: each by one thread, piece after piece.
template <class Number>
void attend_rows(const Call& call) {
    std::atomic<int64_t> unclaimed{0};
#pragma omp parallel
    {
        thread_local Scratch work_memory, list_memory, sum_memory;
        const Work<Number> work(call, work_memory.take<uint8_t>(Work<Number>::bytes(call)));
        int64_t *listed = list_memory.take<int64_t>(2 * call.list_width), *next_listed = listed + call.list_width;
        float* sums = sum_memory.take<float>(2 * call.partial_floats());
        const Partial whole(call, sums), piece(call, sums + call.partial_floats());
        int64_t row = unclaimed++;
        Keys keys = compact(call, row, listed);
        while (row < call.rows) {
            const int64_t next_row = unclaimed++, pieces = num_pieces(keys.count);
            const Keys next_keys = compact(call, next_row, next_listed);
            load_queries(call, row, work);
            for (int64_t number = 0; number < pieces; ++number) {
                const Keys after = number + 1 < pieces ? piece_of(keys, number + 1) : next_keys;
                attend_piece(call, piece_of(keys, number), after, work, number ? piece : whole);
                if (number) merge(call, whole, piece);
            }
            finish(call, row, pieces ? &whole : nullptr);
            row = next_row, keys = next_keys;
            std::swap(listed, next_listed);
        }
    }
}

// Few rows: each piece by one thread, merged when all are there.
template <class Number>
void attend_pieces(const Call& call) {
    thread_local Scratch list_memory, sum_memory;
    const int64_t most = num_pieces(call.list_width), floats = call.partial_floats(), items = call.rows * most;
    int64_t* listed = list_memory.take<int64_t>(call.rows * call.list_width);
    float* sums = sum_memory.take<float>(items * floats);
    std::vector<Keys> keys;
    for (int64_t row = 0; row < call.rows; ++row) keys.push_back(compact(call, row, listed + row * call.list_width));
    const auto keys_of = [&](int64_t item) { return item < items ? piece_of(keys[size_t(item / most)], item % most) : Keys{nullptr, 0}; };
#pragma omp parallel
    {
        thread_local Scratch work_memory;
        const Work<Number> work(call, work_memory.take<uint8_t>(Work<Number>::bytes(call)));
        int64_t loaded = -1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items; ++item) {
            const Keys piece = keys_of(item);
            if (piece.count == 0) continue;
            if (loaded != item / most) load_queries(call, item / most, work);
            loaded = item / most;
            attend_piece(call, piece, keys_of(item + omp_get_num_threads()), work, Partial(call, sums + item * floats));
        }
#pragma omp for
        for (int64_t row = 0; row < call.rows; ++row) {
            const int64_t pieces = num_pieces(keys[size_t(row)].count);
            const Partial whole(call, sums + row * most * floats);
            for (int64_t piece = 1; piece < pieces; ++piece) merge(call, whole, Partial(call, sums + (row * most + piece) * floats));
            finish(call, row, pieces ? &whole : nullptr);
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
