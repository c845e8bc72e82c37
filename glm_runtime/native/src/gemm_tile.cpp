// The instances of the register tile, one per kind and number of rows.
#include "gemm_tile.hpp"

#ifdef GLM_SUPPORTED
#include <array>
#include <utility>

namespace glm {
namespace {

#define GLM_INLINE inline __attribute__((always_inline))

// Half a panel of one step: one k in fp32, a pair in bf16.
GLM_INLINE __m512i load_bits(const char* panel, int64_t step, int half) {
    return _mm512_load_si512(reinterpret_cast<const void*>(panel + step * 128 + half * 64));
}

GLM_INLINE vec even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
GLM_INLINE vec odd_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))); }

template <int R>
GLM_INLINE void accumulate(vec (&sums)[R][2], const vec (&w)[2], const float* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const vec factor = _mm512_set1_ps(x[r * stride]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_fmadd_ps(factor, w[v], sums[r][v]);
    }
}

template <int R>
GLM_INLINE void accumulate_pairs(vec (&sums)[R][2], const __m512i (&w)[2], const bf16* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * stride, 4);
        const __m512bh factor = __m512bh(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, __m512bh(w[v]));
    }
}

template <Kind K, int R>
GLM_INLINE void add_step(vec (&sums)[R][2], const char* panel, int64_t step, const void* x, int64_t stride) {
    const __m512i w[2] = {load_bits(panel, step, 0), load_bits(panel, step, 1)};
    if constexpr (K == kBf16Bf16) {
        accumulate_pairs(sums, w, static_cast<const bf16*>(x) + 2 * step, stride);
    } else if constexpr (K == kFp32Fp32) {
        vec wide[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) wide[v] = _mm512_castsi512_ps(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + step, stride);
    } else {
        vec wide[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) wide[v] = even_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step, stride);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) wide[v] = odd_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step + 1, stride);
    }
}

// The last k of an odd number: x has no partner there, and what lies behind it is not read.
template <Kind K, int R>
GLM_INLINE void add_last(vec (&sums)[R][2], const char* panel, int64_t step, const void* x, int64_t stride) {
    const __m512i w[2] = {load_bits(panel, step, 0), load_bits(panel, step, 1)};
    if constexpr (K == kBf16Bf16) {
        bf16 pairs[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            pairs[r][0] = static_cast<const bf16*>(x)[2 * step + r * stride];
            pairs[r][1] = 0;
        }
        accumulate_pairs(sums, w, &pairs[0][0], 2);
    } else if constexpr (K == kFp32Bf16) {
        vec wide[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) wide[v] = even_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step, stride);
    }
}

template <Kind K, int R>
void tile(const void* x, int64_t stride, const char* panel, int64_t inner, Prefetch prefetch, float* out) {
    const int64_t steps = K == kFp32Fp32 ? inner : inner / 2;
    vec sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_setzero_ps();
    if (prefetch.lines > 0) {
        const int64_t ahead = prefetch.lines * 64;
        const char* line = prefetch.from;
        for (int64_t step = 0; step < steps; ++step, line += ahead) {
            _mm_prefetch(line, _MM_HINT_T1);
            if (prefetch.lines > 1) _mm_prefetch(line + 64, _MM_HINT_T1);
            add_step<K, R>(sums, panel, step, x, stride);
        }
    } else {
        for (int64_t step = 0; step < steps; ++step) add_step<K, R>(sums, panel, step, x, stride);
    }
    if (K != kFp32Fp32 && inner % 2 != 0) add_last<K, R>(sums, panel, steps, x, stride);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) _mm512_store_ps(out + r * kPanel + v * kLanes, sums[r][v]);
}

template <Kind K, size_t... I>
constexpr std::array<TileFunction, sizeof...(I)> all_rows(std::index_sequence<I...>) {
    return {tile<K, int(I) + 1>...};
}

template <Kind K>
TileFunction choose(int64_t rows) {
    static constexpr auto kTiles = all_rows<K>(std::make_index_sequence<kMaxTileRows>());
    return kTiles[size_t(rows - 1)];
}

}  // namespace

TileFunction tile_function(Kind kind, int64_t rows) {
    if (kind == kBf16Bf16) return choose<kBf16Bf16>(rows);
    return kind == kFp32Fp32 ? choose<kFp32Fp32>(rows) : choose<kFp32Bf16>(rows);
}

}  // namespace glm
#endif
