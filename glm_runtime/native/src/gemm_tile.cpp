// The instances of the register tile, one per kind, number of rows and number of panels.
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

template <int R, int V>
GLM_INLINE void accumulate(vec (&sums)[R][V], const vec (&w)[V], const float* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const vec factor = _mm512_set1_ps(x[r * stride]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_fmadd_ps(factor, w[v], sums[r][v]);
    }
}

template <int R, int V>
GLM_INLINE void accumulate_pairs(vec (&sums)[R][V], const __m512i (&w)[V], const bf16* x, int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * stride, 4);
        const __m512bh factor = __m512bh(_mm512_set1_epi32(pair));
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, __m512bh(w[v]));
    }
}

template <int P>
GLM_INLINE void load_step(__m512i (&w)[2 * P], const char* panels, int64_t step, int64_t panel_stride) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        w[2 * p] = load_bits(panels + p * panel_stride, step, 0);
        w[2 * p + 1] = load_bits(panels + p * panel_stride, step, 1);
    }
}

template <Kind K, int R, int P>
GLM_INLINE void add_step(vec (&sums)[R][2 * P], const char* panels, int64_t step, int64_t panel_stride, const void* x, int64_t stride) {
    __m512i w[2 * P];
    load_step<P>(w, panels, step, panel_stride);
    if constexpr (K == kBf16Bf16) {
        accumulate_pairs(sums, w, static_cast<const bf16*>(x) + 2 * step, stride);
    } else if constexpr (K == kFp32Fp32) {
        vec wide[2 * P];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) wide[v] = _mm512_castsi512_ps(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + step, stride);
    } else {
        vec wide[2 * P];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) wide[v] = even_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step, stride);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) wide[v] = odd_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step + 1, stride);
    }
}

// The last k of an odd number: x has no partner there, and what lies behind it is not read.
template <Kind K, int R, int P>
GLM_INLINE void add_last(vec (&sums)[R][2 * P], const char* panels, int64_t step, int64_t panel_stride, const void* x, int64_t stride) {
    __m512i w[2 * P];
    load_step<P>(w, panels, step, panel_stride);
    if constexpr (K == kBf16Bf16) {
        bf16 pairs[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            pairs[r][0] = static_cast<const bf16*>(x)[2 * step + r * stride];
            pairs[r][1] = 0;
        }
        accumulate_pairs(sums, w, &pairs[0][0], 2);
    } else if constexpr (K == kFp32Bf16) {
        vec wide[2 * P];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) wide[v] = even_of(w[v]);
        accumulate(sums, wide, static_cast<const float*>(x) + 2 * step, stride);
    }
}

template <Kind K, int R, int P>
void tile(const void* x, int64_t stride, const void* weights, int64_t inner, Prefetch prefetch, float* out) {
    const char* panels = static_cast<const char*>(weights);
    const int64_t panel_stride = panel_bytes(K, inner);
    const int64_t steps = K == kFp32Fp32 ? inner : inner / 2;
    vec sums[R][2 * P];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) sums[r][v] = _mm512_setzero_ps();
    if (prefetch.lines > 0) {
        const int64_t ahead = prefetch.lines * 64;
        const char* line = prefetch.from;
        for (int64_t step = 0; step < steps; ++step, line += ahead) {
            _mm_prefetch(line, _MM_HINT_T1);
            if (prefetch.lines > 1) _mm_prefetch(line + 64, _MM_HINT_T1);
            add_step<K, R, P>(sums, panels, step, panel_stride, x, stride);
        }
    } else {
        for (int64_t step = 0; step < steps; ++step) add_step<K, R, P>(sums, panels, step, panel_stride, x, stride);
    }
    if (K != kFp32Fp32 && inner % 2 != 0) add_last<K, R, P>(sums, panels, steps, panel_stride, x, stride);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) _mm512_store_ps(out + r * 2 * P * kLanes + v * kLanes, sums[r][v]);
}

template <Kind K, size_t... I>
constexpr std::array<TileFunction, sizeof...(I)> one_panel(std::index_sequence<I...>) {
    return {tile<K, int(I) + 1, 1>...};
}

template <Kind K>
TileFunction choose(int rows, int panels) {
    static constexpr auto kOnePanel = one_panel<K>(std::make_index_sequence<kMaxTileRows>());
    if (panels == 1) return kOnePanel[size_t(rows - 1)];
    if (panels == 4) return tile<K, 1, 4>;
    if (panels == 3) return tile<K, 1, 3>;
    return rows == 1 ? tile<K, 1, 2> : rows == 2 ? tile<K, 2, 2> : tile<K, 3, 2>;
}

}  // namespace

TileFunction tile_function(Kind kind, int rows, int panels) {
    if (kind == kBf16Bf16) return choose<kBf16Bf16>(rows, panels);
    return kind == kFp32Fp32 ? choose<kFp32Fp32>(rows, panels) : choose<kFp32Bf16>(rows, panels);
}

}  // namespace glm
#endif
