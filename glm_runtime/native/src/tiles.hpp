// Small blocks of dot products in a fixed order: what attention and the indexer share.
#pragma once

#include "row_decode.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Lane i of the result is the sum of the lanes of x[i], each by the same tree.
inline vec sum_each(const vec x[16]) {
    vec pairs[8], quads[4];
    for (int i = 0; i < 8; ++i) {
        const vec a = x[2 * i], b = x[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    vec halves[2];
    for (int i = 0; i < 2; ++i) {
        const vec a = quads[2 * i], b = quads[2 * i + 1];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// One step of a chain: 16 products in fp32, or 32 of bf16 numbers in the processor's own order.
inline vec load_numbers(const float* p) { return _mm512_loadu_ps(p); }
inline __m512bh load_numbers(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline vec multiply_add(vec sum, vec a, vec b) { return _mm512_fmadd_ps(a, b, sum); }
inline vec multiply_add(vec sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }

// out[4 i + j] = a[i] . b[j] for 4 x 4 rows of `width` numbers, width a multiple of 32.
template <class Number>
inline vec dots_4x4(const Number* a, int64_t a_stride, const Number* b, int64_t b_stride, int64_t width) {
    constexpr int64_t step = 64 / sizeof(Number);
    vec sums[16];
    for (vec& sum : sums) sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < width; d += step) {
        const auto b0 = load_numbers(b + d), b1 = load_numbers(b + b_stride + d);
        const auto b2 = load_numbers(b + 2 * b_stride + d), b3 = load_numbers(b + 3 * b_stride + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const auto left = load_numbers(a + i * a_stride + d);
            sums[4 * i] = multiply_add(sums[4 * i], left, b0);
            sums[4 * i + 1] = multiply_add(sums[4 * i + 1], left, b1);
            sums[4 * i + 2] = multiply_add(sums[4 * i + 2], left, b2);
            sums[4 * i + 3] = multiply_add(sums[4 * i + 3], left, b3);
        }
    }
    return sum_each(sums);
}

// Two rows of bf16 side by side, number by number; width a multiple of 32.
inline void pair_rows(const bf16* even, const bf16* odd, int64_t width, uint32_t* to) {
    const __m512i take_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), take_high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t c = 0; c < width; c += 32) {
        const __m512i a = _mm512_loadu_si512(even + c), b = _mm512_loadu_si512(odd + c);
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        _mm512_storeu_si512(to + c, _mm512_permutex2var_epi64(low, take_low, high));
        _mm512_storeu_si512(to + c + kLanes, _mm512_permutex2var_epi64(low, take_high, high));
    }
}

// Broadcast of one number, or of one pair of bf16.
inline vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
inline __m512bh broadcast(const uint32_t* p) { return (__m512bh)_mm512_set1_epi32(int(*p)); }
inline __m512bh load_numbers(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// sums[i][v] += sum over k of a[i][k] * b[k][16 v ...], k ascending; a number is a float or a pair of bf16 along k.
template <int Rows, int Vectors, class Number>
inline void accumulate(vec (&sums)[Rows][Vectors], const Number* a, int64_t a_stride, const Number* b, int64_t b_stride, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
        decltype(load_numbers(b)) right[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) right[v] = load_numbers(b + k * b_stride + kLanes * v);
#pragma GCC unroll 8
        for (int i = 0; i < Rows; ++i) {
            const auto left = broadcast(a + i * a_stride + k);
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) sums[i][v] = multiply_add(sums[i][v], left, right[v]);
        }
    }
}

}  // namespace glm
#endif
