// Attention on rebuilt keys and values, causal or over lists. Contract: ops/dense_mla/reference.py. Serves fast mode's prefill.
//
// A thread takes a head: it lays the head's keys out in tiles of 64 (number by number, keys side by side) and its values in pairs of
// keys, then walks blocks of 24 rows over the tiles with an online softmax. Both products are the same small block of `tiles.hpp`.
#include "index_keys.hpp"

#ifdef GLM_SUPPORTED
namespace {
using namespace glm;

constexpr int kBlockRows = 24;
constexpr int kRowsAtOnce = 6;

struct Call {
    const void* queries;
    int64_t rows, heads, nope, rope, value;
    const void *rebuilt, *shared_key;
    int64_t shared_stride;
    const int64_t* lists;
    int64_t list_width, start;
    float scale;
    void* attended;

    int64_t context() const { return start + rows; }
    int64_t tiles() const { return (context() + kTileKeys - 1) / kTileKeys; }
    int64_t width() const { return nope + rope; }
    int64_t padded_width() const { return round_up(width(), 32); }
    int64_t padded_value() const { return round_up(value, 64); }
};

// How a tile lies: Element is a float, or a pair of bf16 (along the width for keys, along the keys for values).
template <class Number>
struct Head {
    using Element = typename Operand<Number>::type;
    static constexpr int64_t kPair = 4 / sizeof(Number);

    int64_t key_length, tile_keys, tile_values;
    Number* rows;
    Element *keys, *values, *queries, *weights;
    float *logits, *sums, *highest, *totals;

    static int64_t bytes(const Call& call) {
        const int64_t key_bytes = call.padded_width() * int64_t(sizeof(Number));
        const int64_t value_bytes = call.padded_value() * int64_t(sizeof(Number));
        const int64_t tiles = (call.tiles() + 1) * kTileKeys * (key_bytes + value_bytes);
        return tiles + kBlockRows * (key_bytes + kTileKeys * 8 + call.padded_value() * 4 + 8) + 4096;
    }
    Head(const Call& call, uint8_t* memory)
        : key_length(call.padded_width() / kPair), tile_keys(key_length * kTileKeys), tile_values(kTileKeys / kPair * call.padded_value()) {
        rows = reinterpret_cast<Number*>(memory);
        keys = reinterpret_cast<Element*>(rows + kTileKeys * larger(call.padded_width(), call.padded_value()));
        values = keys + call.tiles() * tile_keys;
        queries = values + call.tiles() * tile_values;
        weights = queries + kBlockRows * key_length;
        logits = reinterpret_cast<float*>(weights + kBlockRows * kTileKeys);
        sums = logits + kBlockRows * kTileKeys;
        highest = sums + kBlockRows * call.padded_value();
        totals = highest + kBlockRows;
    }
};

template <class Number>
void lay_out_keys(const Call& call, int64_t head, int64_t tile, const Head<Number>& to) {
    const Number* rebuilt = static_cast<const Number*>(call.rebuilt);
    const Number* shared = static_cast<const Number*>(call.shared_key);
    const int64_t width = call.padded_width(), row_numbers = call.heads * (call.nope + call.value);
    for (int64_t key = 0; key < kTileKeys; ++key) {
        const int64_t token = tile * kTileKeys + key;
        Number* row = to.rows + key * width;
        std::memset(static_cast<void*>(row), 0, size_t(width) * sizeof(Number));
        if (token >= call.context()) continue;
        std::memcpy(row, rebuilt + token * row_numbers + head * (call.nope + call.value), size_t(call.nope) * sizeof(Number));
        std::memcpy(row + call.nope, shared + token * call.shared_stride, size_t(call.rope) * sizeof(Number));
    }
    const uint32_t* elements = reinterpret_cast<const uint32_t*>(to.rows);
    uint32_t* columns = reinterpret_cast<uint32_t*>(to.keys + tile * to.tile_keys);
    for (int64_t i = 0; i < to.key_length; i += 16)
        for (int64_t key = 0; key < kTileKeys; key += 16)
            transpose_16x16(elements + key * to.key_length + i, to.key_length, columns + i * kTileKeys + key, kTileKeys);
}

template <class Number>
void lay_out_values(const Call& call, int64_t head, int64_t tile, const Head<Number>& to) {
    const Number* rebuilt = static_cast<const Number*>(call.rebuilt);
    const int64_t width = call.padded_value(), head_numbers = call.nope + call.value;
    const int64_t row_numbers = call.heads * head_numbers, first = head * head_numbers + call.nope;
    Number* rows = sizeof(Number) == 4 ? reinterpret_cast<Number*>(to.values + tile * to.tile_values) : to.rows;
    for (int64_t key = 0; key < kTileKeys; ++key) {
        const int64_t token = tile * kTileKeys + key;
        std::memset(static_cast<void*>(rows + key * width), 0, size_t(width) * sizeof(Number));
        if (token < call.context())
            std::memcpy(rows + key * width, rebuilt + token * row_numbers + first, size_t(call.value) * sizeof(Number));
    }
    if constexpr (sizeof(Number) == 2)
        for (int64_t key = 0; key < kTileKeys; key += 2)
            pair_rows(rows + key * width, rows + (key + 1) * width, width, to.values + tile * to.tile_values + key / 2 * width);
}

template <class Number>
void load_queries(const Call& call, int64_t head, int64_t first, int64_t count, const Head<Number>& to) {
    Number* rows = reinterpret_cast<Number*>(to.queries);
    std::memset(static_cast<void*>(rows), 0, size_t(kBlockRows * call.padded_width()) * sizeof(Number));
    for (int64_t row = 0; row < count; ++row) {
        const Number* from = static_cast<const Number*>(call.queries) + ((first + row) * call.heads + head) * call.width();
        std::memcpy(rows + row * call.padded_width(), from, size_t(call.width()) * sizeof(Number));
    }
}

// Which keys of a tile row `row` of the call attends to; masks: bits by [row][tile], or null for all up to the row's own.
inline uint64_t seen_keys(const Call& call, const uint64_t* masks, int64_t row, int64_t tile) {
    if (masks != nullptr) return masks[row * call.tiles() + tile];
    const int64_t count = call.start + row + 1 - tile * kTileKeys;
    return count >= kTileKeys ? ~uint64_t(0) : count > 0 ? (uint64_t(1) << count) - 1 : 0;
}

template <class Number>
void weigh_row(const Call& call, uint64_t seen, int64_t row, const Head<Number>& head) {
    float* logits = head.logits + row * kTileKeys;
    const vec lowest = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(call.scale);
    vec x[kTileVectors], top = lowest;
    for (int v = 0; v < kTileVectors; ++v) {
        x[v] = _mm512_mask_mul_ps(lowest, __mmask16(seen >> (kLanes * v)), _mm512_loadu_ps(logits + kLanes * v), scale);
        top = _mm512_max_ps(top, x[v]);
    }
    const float before = head.highest[row], tile_top = max_lanes(top), highest = tile_top > before ? tile_top : before;
    vec total = _mm512_setzero_ps();
    for (int v = 0; v < kTileVectors; ++v) {
        const vec weight = glm::exp(_mm512_sub_ps(x[v], _mm512_set1_ps(highest)));
        total = _mm512_add_ps(total, weight);
        if constexpr (sizeof(Number) == 2)
            store_bf16(reinterpret_cast<bf16*>(head.weights + row * (kTileKeys / 2)) + kLanes * v, weight);
        else
            _mm512_storeu_ps(head.weights + row * kTileKeys + kLanes * v, weight);
    }
    const float factor = _mm512_cvtss_f32(glm::exp(_mm512_set1_ps(before - highest)));
    head.highest[row] = highest;
    head.totals[row] = head.totals[row] * factor + sum_lanes(total);
    if (factor != 1.0f)
        for (int64_t c = 0; c < call.padded_value(); c += kLanes) {
            float* sum = head.sums + row * call.padded_value() + c;
            _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(factor)));
        }
}

// out[6][64] (+)= a[6][count] b[count][64]
template <class Element>
void multiply(const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t count, bool adds, float* out,
              int64_t out_stride) {
    vec sums[kRowsAtOnce][4];
    for (int i = 0; i < kRowsAtOnce; ++i)
        for (int v = 0; v < 4; ++v) sums[i][v] = adds ? _mm512_loadu_ps(out + i * out_stride + kLanes * v) : _mm512_setzero_ps();
    accumulate(sums, a, a_stride, b, b_stride, count);
    for (int i = 0; i < kRowsAtOnce; ++i)
        for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + i * out_stride + kLanes * v, sums[i][v]);
}

template <class Number>
void attend_block(const Call& call, const uint64_t* masks, int64_t number, int64_t first, const Head<Number>& head) {
    const int64_t count = smaller(kBlockRows, call.rows - first), value = call.padded_value();
    const int64_t tiles = (call.start + first + count + kTileKeys - 1) / kTileKeys, weight_stride = kTileKeys / Head<Number>::kPair;
    load_queries(call, number, first, count, head);
    std::memset(head.sums, 0, size_t(kBlockRows * value) * 4);
    for (int row = 0; row < kBlockRows; ++row) head.highest[row] = -1e30f, head.totals[row] = 0.0f;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        uint64_t seen[kBlockRows] = {}, any = 0;
        for (int64_t row = 0; row < count; ++row) any |= seen[row] = seen_keys(call, masks, first + row, tile);
        if (!any) continue;
        for (int64_t row = 0; row < round_up(count, kRowsAtOnce); row += kRowsAtOnce)
            multiply(head.queries + row * head.key_length, head.key_length, head.keys + tile * head.tile_keys, kTileKeys,
                     head.key_length, false, head.logits + row * kTileKeys, kTileKeys);
        for (int64_t row = 0; row < round_up(count, kRowsAtOnce); ++row) weigh_row(call, seen[row], row, head);
        for (int64_t c = 0; c < value; c += 64)
            for (int64_t row = 0; row < round_up(count, kRowsAtOnce); row += kRowsAtOnce)
                multiply(head.weights + row * weight_stride, weight_stride, head.values + tile * head.tile_values + c, value,
                         weight_stride, true, head.sums + row * value + c, value);
    }
    for (int64_t row = 0; row < count; ++row) {
        Number* to = static_cast<Number*>(call.attended) + ((first + row) * call.heads + number) * call.value;
        for (int64_t c = 0; c < call.value; ++c) {
            const float x = head.sums[row * value + c] / head.totals[row];
            if constexpr (sizeof(Number) == 2)
                to[c] = narrow(x);
            else
                to[c] = x;
        }
    }
}

// Lists as bits by [row][tile].
void make_masks(const Call& call, uint64_t* masks) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) {
        uint64_t* mask = masks + row * call.tiles();
        std::memset(mask, 0, size_t(call.tiles()) * 8);
        for (int64_t i = 0; i < call.list_width; ++i) {
            const int64_t token = call.lists[row * call.list_width + i];
            if (token >= 0) mask[token / kTileKeys] |= uint64_t(1) << token % kTileKeys;
        }
    }
}

template <class Number>
void attend(const Call& call) {
    thread_local Scratch mask_memory;
    uint64_t* masks = call.lists == nullptr ? nullptr : mask_memory.take<uint64_t>(call.rows * call.tiles());
    if (masks != nullptr) make_masks(call, masks);
#pragma omp parallel
    {
        thread_local Scratch memory;
        const Head<Number> head(call, memory.take<uint8_t>(Head<Number>::bytes(call)));
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < call.heads; ++number) {
            for (int64_t tile = 0; tile < call.tiles(); ++tile) {
                lay_out_keys(call, number, tile, head);
                lay_out_values(call, number, tile, head);
            }
            for (int64_t first = 0; first < call.rows; first += kBlockRows) attend_block(call, masks, number, first, head);
        }
    }
}

}  // namespace

// queries [rows, heads, nope + rope]; rebuilt [start + rows, heads, nope + value]; shared_key [start + rows, rope] at a row stride;
// lists [rows, list_width] or null; attended [rows, heads, value]. All fp32, or all bf16.
extern "C" void glm_dense_mla(const void* queries, int64_t is_bf16, int64_t rows, int64_t heads, int64_t nope, int64_t rope, int64_t value,
                              const void* rebuilt, const void* shared_key, int64_t shared_stride, const int64_t* lists, int64_t list_width,
                              int64_t start, float scale, void* attended) {
    const Call call{queries, rows, heads, nope, rope, value, rebuilt, shared_key, shared_stride, lists, list_width, start, scale, attended};
    if (is_bf16)
        attend<bf16>(call);
    else
        attend<float>(call);
}
#endif
