// Rows of numbers that are fp32 or bf16, widened to fp32 in registers, and the root mean square of one.
#pragma once

#include <cmath>

#include "simd.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

// What is read or written: fp32 or bf16, counted in numbers.
struct Numbers {
    char* bytes;
    bool is_bf16;

    Numbers(const void* start, bool bf16_) : bytes(static_cast<char*>(const_cast<void*>(start))), is_bf16(bf16_) {}
    Numbers at(int64_t i) const { return Numbers(bytes + (is_bf16 ? 2 : 4) * i, is_bf16); }

    // Lanes that are not asked for are zero.
    vec load(int64_t i, __mmask16 lanes) const {
        if (!is_bf16) return _mm512_maskz_loadu_ps(lanes, reinterpret_cast<float*>(bytes) + i);
        const __m256i half = _mm256_maskz_loadu_epi16(lanes, reinterpret_cast<bf16*>(bytes) + i);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    void store(int64_t i, vec x, __mmask16 lanes) const {
        if (!is_bf16) _mm512_mask_storeu_ps(reinterpret_cast<float*>(bytes) + i, lanes, x);
        else _mm256_mask_storeu_epi16(reinterpret_cast<bf16*>(bytes) + i, lanes, narrow(x));
    }
    // As it will read once stored.
    vec rounded(vec x) const { return is_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16)) : x; }
};

inline __mmask16 lanes_at(int64_t i, int64_t width) { return width - i >= kLanes ? __mmask16(0xffff) : first_lanes(width - i); }

// Sum over a row of what `term(i, lanes)` gives for 16 numbers: four chains of lanes, joined in a fixed order, so that the bits depend
// on the row and its width alone.
template <class Term>
inline float sum_row(int64_t width, Term term) {
    vec chains[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < width; i += 4 * kLanes)
        for (int c = 0; c < 4; ++c) {
            const int64_t at = i + c * kLanes;
            if (at < width) chains[c] = _mm512_add_ps(chains[c], term(at, lanes_at(at, width)));
        }
    return sum_lanes(_mm512_add_ps(_mm512_add_ps(chains[0], chains[1]), _mm512_add_ps(chains[2], chains[3])));
}

// 1 / sqrt(mean(x^2) + eps) of a row.
inline float inverse_rms(Numbers x, int64_t width, float eps) {
    const float squares = sum_row(width, [&](int64_t i, __mmask16 lanes) {
        const vec numbers = x.load(i, lanes);
        return _mm512_mul_ps(numbers, numbers);
    });
    return 1.0f / std::sqrt(squares / float(width) + eps);
}

// y = x * scale * w, rounded once, in that order.
inline void scale_row(Numbers x, float scale, Numbers weight, Numbers y, int64_t width) {
    const vec scales = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = lanes_at(i, width);
        y.store(i, _mm512_mul_ps(_mm512_mul_ps(x.load(i, lanes), scales), weight.load(i, lanes)), lanes);
    }
}

inline void rms_norm_row(Numbers x, Numbers weight, Numbers y, int64_t width, float eps) {
    scale_row(x, inverse_rms(x, width, eps), weight, y, width);
}

// Numbers that one thread should at least have: below it, waking the others costs more than they save.
constexpr int64_t kWorthThreads = 1 << 15;

}  // namespace glm
#endif
