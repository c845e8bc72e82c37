// Tiles of index keys against rows of queries: the part that `index_logits` and `index_select` share.
#pragma once

#include "scratch.hpp"
#include "tiles.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileVectors = kTileKeys / kLanes;

// A region of index keys: planes of numbers and of scales, each with its own block stride in bytes.
struct IndexKeys {
    const uint8_t *numbers, *scales;
    int64_t block_bytes, token_bytes, scale_block_bytes, scale_token_bytes;
    int64_t block_size, width;
    RowKind kind;

    int64_t padded_width() const { return round_up(width, 32); }
};

struct IndexQueries {
    const void* numbers;
    const float* weights;
    bool are_bf16;
    int64_t heads, width;

    int64_t padded_heads() const { return round_up(heads, 4); }
};

// Four 4-byte columns a lane: rows [16][stride] of 4-byte elements become columns [16][to_stride].
inline void transpose_16x16(const uint32_t* from, int64_t stride, uint32_t* to, int64_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

// Operands of a chain of products: a float, or a pair of bf16 that are neighbours in the key.
template <class Number>
struct Operand;
template <>
struct Operand<float> {
    using type = float;
};
template <>
struct Operand<bf16> {
    using type = uint32_t;
};

// One decoded tile: rows [64][width], then columns [width or width / 2][64]; factors [64].
template <class Number>
class KeyTile {
  public:
    using Element = typename Operand<Number>::type;
    static int64_t bytes(const IndexKeys& keys) { return 2 * kTileKeys * keys.padded_width() * int64_t(sizeof(Number)) + kTileKeys * 4; }
    KeyTile(const IndexKeys& keys, uint8_t* memory)
        : keys_(keys), length_(keys.padded_width() * int64_t(sizeof(Number)) / 4), rows_(reinterpret_cast<Number*>(memory)),
          columns_(reinterpret_cast<Element*>(rows_ + kTileKeys * keys.padded_width())),
          factors_(reinterpret_cast<float*>(columns_ + kTileKeys * length_)) {}

    // Tokens [first, first + count) of a sequence; keys behind them are zero.
    void load(const int64_t* block_table, int64_t first, int64_t count) {
        for (int64_t key = 0; key < kTileKeys; ++key) {
            Number* row = rows_ + key * keys_.padded_width();
            if (key >= count) {
                std::memset(static_cast<void*>(row), 0, size_t(keys_.padded_width()) * sizeof(Number));
                factors_[key] = 0.0f;
                continue;
            }
            const int64_t token = first + key, block = block_table[token / keys_.block_size], offset = token % keys_.block_size;
            const uint8_t* scales = keys_.scales + block * keys_.scale_block_bytes + offset * keys_.scale_token_bytes;
            decode_row(keys_.kind, keys_.numbers + block * keys_.block_bytes + offset * keys_.token_bytes, scales, keys_.width, row);
            factors_[key] = has_factor(keys_.kind) ? index_factor(keys_.kind, scales) : 1.0f;
        }
        const uint32_t* elements = reinterpret_cast<const uint32_t*>(rows_);
        uint32_t* columns = reinterpret_cast<uint32_t*>(columns_);
        for (int64_t i = 0; i < length_; i += 16)
            for (int64_t key = 0; key < kTileKeys; key += 16)
                transpose_16x16(elements + key * length_ + i, length_, columns + i * kTileKeys + key, kTileKeys);
    }

    // scores[64] = factor * sum over heads, ascending, of weight * ReLU(query . key); queries: packed, see `pack`.
    void score(const Number* queries, const float* weights, int64_t heads, float* scores) const {
        const Element* elements = reinterpret_cast<const Element*>(queries);
        vec total[kTileVectors];
        for (vec& x : total) x = _mm512_setzero_ps();
        for (int64_t head = 0; head < heads; head += 4) {
            vec dots[4][kTileVectors];
            for (auto& row : dots)
                for (vec& x : row) x = _mm512_setzero_ps();
            accumulate(dots, elements + head * length_, length_, columns_, kTileKeys, length_);
            for (int i = 0; i < 4 && head + i < heads; ++i)
                for (int v = 0; v < kTileVectors; ++v)  // max(0, NaN) is NaN
                    total[v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[head + i]), _mm512_max_ps(_mm512_setzero_ps(), dots[i][v]), total[v]);
        }
        for (int v = 0; v < kTileVectors; ++v) {
            const vec x = has_factor(keys_.kind) ? _mm512_mul_ps(total[v], _mm512_loadu_ps(factors_ + kLanes * v)) : total[v];
            _mm512_storeu_ps(scores + kLanes * v, x);
        }
    }

  private:
    const IndexKeys& keys_;
    int64_t length_;
    Number* rows_;
    Element* columns_;
    float* factors_;
};

// One row of queries [heads][width] with zeros up to whole heads of four and widths of 32.
template <class Number>
void pack(const IndexQueries& queries, int64_t row, Number* to) {
    const int64_t width = round_up(queries.width, 32);
    std::memset(static_cast<void*>(to), 0, size_t(queries.padded_heads() * width) * sizeof(Number));
    for (int64_t head = 0; head < queries.heads; ++head) {
        const int64_t from = (row * queries.heads + head) * queries.width;
        for (int64_t d = 0; d < queries.width; ++d) {
            if constexpr (sizeof(Number) == 2)
                to[head * width + d] = static_cast<const bf16*>(queries.numbers)[from + d];
            else if (queries.are_bf16)
                to[head * width + d] = widen(static_cast<const bf16*>(queries.numbers)[from + d]);
            else
                to[head * width + d] = static_cast<const float*>(queries.numbers)[from + d];
        }
    }
}

// bf16 products serve where both sides are bf16 numbers already; then nothing is rounded.
inline bool has_bf16_products(const IndexQueries& queries, const IndexKeys& keys) { return queries.are_bf16 && keys.kind != RowKind::fp32; }

}  // namespace glm
#endif
