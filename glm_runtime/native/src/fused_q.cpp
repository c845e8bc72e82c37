// The query side of attention and of the indexer. Contracts: ops/fused_q/reference.py, bit for bit.
#include "row_decode.hpp"

#ifdef GLM_SUPPORTED
#include <cmath>

namespace {
using namespace glm;

// Rows of fp32 or bf16 numbers, read and written as fp32.
inline float read(const void* numbers, int64_t i, bool is_bf16) {
    return is_bf16 ? widen(static_cast<const bf16*>(numbers)[i]) : static_cast<const float*>(numbers)[i];
}
inline void write(void* numbers, int64_t i, float x, bool is_bf16) {
    if (is_bf16)
        static_cast<bf16*>(numbers)[i] = narrow(x);
    else
        static_cast<float*>(numbers)[i] = x;
}

inline float power_of_two(int32_t biased) {
    const uint32_t bits = uint32_t(biased) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}

// Biased exponent of the least power of two, from the floor on, that brings `amax` within `largest`; 255 when it is not finite.
// Adding what the mantissa of `largest` lacks to a full one carries exactly when amax's mantissa is larger.
inline int32_t scale_exponent(float amax, float largest, int32_t floor_exponent) {
    if (!std::isfinite(amax)) return 255;
    uint32_t bits, largest_bits;
    std::memcpy(&bits, &amax, 4);
    std::memcpy(&largest_bits, &largest, 4);
    const int32_t carried = int32_t(bits + (0x7fffffu - (largest_bits & 0x7fffffu)));
    const int32_t biased = (carried >> 23) - (int32_t(largest_bits >> 23) - 127);
    return biased > 127 + floor_exponent ? biased : 127 + floor_exponent;
}

// Nearest multiple of a power of two, ties to even; |x| is far below 2^22 steps.
inline float to_multiple(float x, float step) {
    const float magic = 12582912.0f * step;
    const float rounded = (std::fabs(x) + magic) - magic;
    return std::copysign(rounded, x);
}

inline float to_e4m3(float x) {
    if (std::isnan(x)) return x;
    const float magnitude = std::fabs(x);
    if (magnitude >= 448.0f) return std::copysign(448.0f, x);
    if (magnitude < 0.015625f) return to_multiple(x, 0.001953125f);
    return to_multiple(x, std::ldexp(1.0f, std::ilogb(magnitude) - 3));
}

inline float to_e2m1(float x) {
    if (std::isnan(x)) return 0.0f;
    const float magnitude = std::fabs(x);
    if (magnitude >= 6.0f) return std::copysign(6.0f, x);
    return to_multiple(x, magnitude < 2.0f ? 0.5f : magnitude < 4.0f ? 1.0f : 2.0f);
}

inline float largest_of(const float* x, int64_t count) {
    float amax = 0.0f;
    bool has_nan = false;
    for (int64_t i = 0; i < count; ++i) {
        const float magnitude = std::fabs(x[i]);
        has_nan |= std::isnan(magnitude);
        amax = magnitude > amax ? magnitude : amax;
    }
    return has_nan ? NAN : amax;
}

// A query as an FP8 index format computes with it; returns the scale as a reader decodes it, which goes into the head weight.
float round_fp8(float* x, int64_t width, bool is_ue8m0) {
    const float scale = power_of_two(scale_exponent(largest_of(x, width), 448.0f, -22));
    for (int64_t i = 0; i < width; ++i) x[i] = to_e4m3(x[i] / scale);
    return is_ue8m0 && std::isinf(scale) ? NAN : scale;
}

void round_mxfp4(float* x, int64_t width) {
    for (int64_t first = 0; first < width; first += 32) {
        const int32_t exponent = scale_exponent(largest_of(x + first, 32), 6.0f, -126);
        const float scale = power_of_two(exponent), stored = exponent == 255 ? NAN : scale;
        for (int64_t i = first; i < first + 32; ++i) x[i] = to_e2m1(x[i] / scale) * stored;
    }
}

}  // namespace

// heads [rows, heads, nope + rope] at row stride; absorbed [rows, heads, latent] at two strides; out [rows, heads, latent + rope].
// Strides are in numbers. cos, sin [rows, rope / 2].
extern "C" void glm_fused_q(const void* heads, int64_t row_stride, const void* absorbed, int64_t absorbed_row_stride,
                            int64_t absorbed_head_stride, int64_t is_bf16, const float* cos, const float* sin, int64_t num_rows,
                            int64_t num_heads, int64_t nope, int64_t rope, int64_t latent, void* out) {
    const bool are_bf16 = is_bf16 != 0;
    const int64_t number_bytes = are_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) if (num_rows * num_heads > 64)
    for (int64_t item = 0; item < num_rows * num_heads; ++item) {
        const int64_t row = item / num_heads, head = item % num_heads, to = item * (latent + rope);
        const int64_t first_absorbed = row * absorbed_row_stride + head * absorbed_head_stride;
        const uint8_t* from = static_cast<const uint8_t*>(absorbed) + first_absorbed * number_bytes;
        std::memcpy(static_cast<uint8_t*>(out) + to * number_bytes, from, size_t(latent * number_bytes));
        const int64_t first = row * row_stride + head * (nope + rope) + nope;
        for (int64_t i = 0; i < rope / 2; ++i) {
            const float even = read(heads, first + 2 * i, are_bf16), odd = read(heads, first + 2 * i + 1, are_bf16);
            const float c = cos[row * (rope / 2) + i], s = sin[row * (rope / 2) + i];
            write(out, to + latent + 2 * i, even * c - odd * s, are_bf16);
            write(out, to + latent + 2 * i + 1, odd * c + even * s, are_bf16);
        }
    }
}

// flat [rows, heads, width] at row stride, its first `rope` numbers to be rotated; weights [rows, heads]. out [rows, heads, width], of
// the input's dtype, or bf16 beside packed keys; out_weights [rows, heads]. width <= 1024.
extern "C" void glm_index_queries(const void* flat, int64_t row_stride, int64_t is_bf16, const float* weights, const float* cos,
                                  const float* sin, int64_t num_rows, int64_t num_heads, int64_t width, int64_t rope, int64_t kind,
                                  void* out, float* out_weights) {
    const bool are_bf16 = is_bf16 != 0, is_mxfp4 = RowKind(kind) == RowKind::index_mxfp4, is_fp8 = has_factor(RowKind(kind));
    const bool writes_bf16 = are_bf16 || is_mxfp4 || is_fp8;
#pragma omp parallel for schedule(static) if (num_rows * num_heads > 64)
    for (int64_t item = 0; item < num_rows * num_heads; ++item) {
        const int64_t row = item / num_heads, first = row * row_stride + item % num_heads * width;
        float x[1024];
        for (int64_t i = 0; i < rope / 2; ++i) {
            const float even = read(flat, first + 2 * i, are_bf16), odd = read(flat, first + 2 * i + 1, are_bf16);
            const float c = cos[row * (rope / 2) + i], s = sin[row * (rope / 2) + i];
            x[2 * i] = even * c - odd * s;
            x[2 * i + 1] = odd * c + even * s;
            if (are_bf16) x[2 * i] = widen(narrow(x[2 * i])), x[2 * i + 1] = widen(narrow(x[2 * i + 1]));
        }
        for (int64_t i = rope; i < width; ++i) x[i] = read(flat, first + i, are_bf16);
        float weight = weights[item];
        if (is_fp8) weight *= round_fp8(x, width, RowKind(kind) == RowKind::index_fp8_ue8m0);
        if (is_mxfp4) round_mxfp4(x, width);
        out_weights[item] = weight;
        for (int64_t i = 0; i < width; ++i) write(out, item * width + i, x[i], writes_bf16);
    }
}
#endif
