// Numbers as cached rows, for every format of `row_format.py`. Contract: `ops/cache_rows/reference.py`, bit for bit.
#pragma once

#include "row_decode.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

constexpr uint32_t kInfinityBits = 0x7f800000u;

inline __m512i magnitude_bits(vec x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline float float_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

// Nearest e4m3 code of 16 numbers, ties to even, saturating; NaN is 127 whatever its sign.
inline __m128i e4m3_codes(vec x) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const vec magnitude = _mm512_min_ps(_mm512_castsi512_ps(magnitude_bits(x)), _mm512_set1_ps(448.0f));
    const __m512i bits = _mm512_castps_si512(magnitude);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7ffff)), odd), 20);
    const __m512i normal = _mm512_sub_epi32(rounded, _mm512_set1_epi32((127 - 7) << 3));
    const vec steps = _mm512_mul_ps(magnitude, _mm512_set1_ps(512.0f));  // of 2^-9, below the least normal number
    const __m512i subnormal = _mm512_cvt_roundps_epi32(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 is_subnormal = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0.015625f), _CMP_LT_OQ);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24), _mm512_set1_epi32(0x80));
    const __m512i codes = _mm512_or_si512(_mm512_mask_blend_epi32(is_subnormal, normal, subnormal), sign);
    return _mm512_cvtepi32_epi8(_mm512_mask_blend_epi32(is_nan, codes, _mm512_set1_epi32(127)));
}

// Nearest e2m1 codes of 16 numbers as 8 bytes, the even index in the low nibble. A boundary belongs to the neighbour with the even
// code. NaN is +0: its tile's scale carries it.
inline void store_e2m1(uint8_t* packed, vec x) {
    const __mmask16 is_number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    const vec magnitude = _mm512_castsi512_ps(magnitude_bits(x));
    __m512i codes = _mm512_maskz_and_epi32(is_number, _mm512_srli_epi32(_mm512_castps_si512(x), 28), _mm512_set1_epi32(8));
    const float bounds[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    for (int lower = 0; lower < 7; ++lower) {
        const vec bound = _mm512_set1_ps(bounds[lower]);
        const __mmask16 larger = _mm512_cmp_ps_mask(magnitude, bound, _CMP_GT_OQ), equal = _mm512_cmp_ps_mask(magnitude, bound, _CMP_EQ_OQ);
        const __mmask16 above = lower % 2 ? larger | equal : larger;
        codes = _mm512_mask_add_epi32(codes, above, codes, _mm512_set1_epi32(1));
    }
    const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));  // the odd code comes down to bits 4 to 7
    _mm_storel_epi64(reinterpret_cast<__m128i*>(packed), _mm512_cvtepi64_epi8(pairs));
}

// Bits of the largest magnitude; not below kInfinityBits when a number is not finite. width: a multiple of 16.
inline uint32_t amax_bits(const float* numbers, int64_t width) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += kLanes) largest = _mm512_max_epu32(largest, magnitude_bits(_mm512_loadu_ps(numbers + i)));
    return _mm512_reduce_max_epu32(largest);
}

// Biased exponent of the least power of two, from the floor on, that brings a tile within 448 = 1.75 * 2^8 or 6 = 1.5 * 2^2: what the
// target's mantissa lacks to a full one carries into the exponent exactly when amax's mantissa is larger. 255 if not finite.
inline uint32_t scale_exponent(uint32_t amax, uint32_t target_fraction, int target_exponent, int floor_exponent) {
    if (amax >= kInfinityBits) return 255;
    const int biased = int((amax + 0x7fffffu - target_fraction) >> 23) - target_exponent;
    return uint32_t(biased < 127 + floor_exponent ? 127 + floor_exponent : biased);
}
inline uint32_t e4m3_scale_exponent(uint32_t amax, int floor_exponent) { return scale_exponent(amax, 0x600000u, 8, floor_exponent); }
inline uint32_t e2m1_scale_exponent(uint32_t amax, int floor_exponent) { return scale_exponent(amax, 0x400000u, 2, floor_exponent); }

// Codes of numbers over a scale. width: a multiple of 16.
inline void encode_e4m3(const float* numbers, int64_t width, float scale, uint8_t* packed) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const vec quotients = _mm512_div_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(scale));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + i), e4m3_codes(quotients));
    }
}

inline void encode_nvfp4(const float* numbers, uint8_t* row) {
    alignas(64) float amaxes[32];
    for (int j = 0; j < 32; ++j) {
        const uint32_t bits = amax_bits(numbers + 16 * j, 16);
        amaxes[j] = bits >= kInfinityBits ? float_of(0x7fc00000u) : float_of(bits);
    }
    alignas(16) uint8_t codes[32];
    for (int j = 0; j < 32; j += 16) {
        const vec sixths = _mm512_div_ps(_mm512_load_ps(amaxes + j), _mm512_set1_ps(6.0f));
        const vec wanted = _mm512_max_ps(_mm512_set1_ps(0.001953125f), sixths);  // of two, the second where one is NaN
        _mm_store_si128(reinterpret_cast<__m128i*>(codes + j), e4m3_codes(wanted));
    }
    for (int j = 0; j < 32; ++j) {
        store_e2m1(row + 8 * j, _mm512_div_ps(_mm512_loadu_ps(numbers + 16 * j), _mm512_set1_ps(e4m3_number(codes[j]))));
        row[320 + 8 * (j % 4) + j / 4] = codes[j];
    }
    encode_e4m3(numbers + 512, 64, 1.0f, row + 256);
}

inline __mmask16 lanes_left(int64_t left) { return first_lanes(left < kLanes ? left : kLanes); }

// One row of `width` numbers. `numbers` may be read up to the next multiple of 16.
inline void encode_row(RowKind kind, const float* numbers, int64_t width, uint8_t* row, uint8_t* scales) {
    switch (kind) {
        case RowKind::bf16:
            for (int64_t i = 0; i < width; i += kLanes)
                _mm256_mask_storeu_epi16(row + 2 * i, lanes_left(width - i), narrow(_mm512_loadu_ps(numbers + i)));
            return;
        case RowKind::fp32:
            std::memcpy(row, numbers, 4 * width);
            return;
        case RowKind::fp8_e4m3:
            for (int64_t i = 0; i < width; i += kLanes)
                _mm_mask_storeu_epi8(row + i, lanes_left(width - i), e4m3_codes(_mm512_loadu_ps(numbers + i)));
            return;
        case RowKind::fp8_ds_mla:
            for (int tile = 0; tile < 4; ++tile) {
                const float* const tiled = numbers + 128 * tile;
                const uint32_t scale = e4m3_scale_exponent(amax_bits(tiled, 128), -13) << 23;
                encode_e4m3(tiled, 128, float_of(scale), row + 128 * tile);
                std::memcpy(row + 512 + 4 * tile, &scale, 4);
            }
            for (int64_t i = 0; i < 64; i += kLanes)
                store_bf16(reinterpret_cast<bf16*>(row + 528 + 2 * i), _mm512_loadu_ps(numbers + 512 + i));
            return;
        case RowKind::nvfp4_ds_mla:
            encode_nvfp4(numbers, row);
            return;
        case RowKind::index_mxfp4:
            for (int tile = 0; tile < 4; ++tile) {
                const uint32_t exponent = e2m1_scale_exponent(amax_bits(numbers + 32 * tile, 32), -126);
                scales[tile] = uint8_t(exponent);
                for (int64_t i = 32 * tile; i < 32 * tile + 32; i += kLanes)
                    store_e2m1(row + i / 2, _mm512_div_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(float_of(exponent << 23))));
            }
            return;
        default:
            const uint32_t exponent = e4m3_scale_exponent(amax_bits(numbers, 128), -22), scale = exponent << 23;
            encode_e4m3(numbers, 128, float_of(scale), row);
            if (kind == RowKind::index_fp8_fp32) std::memcpy(scales, &scale, 4);
            else std::memset(scales, int(exponent), 4);
    }
}

// Where the rows of one region lie: up to two planes, strides in bytes.
struct Region {
    RowKind kind;
    int64_t block_size;
    uint8_t* rows;
    int64_t rows_block_stride, rows_stride;
    uint8_t* scales;
    int64_t scales_block_stride, scales_stride;

    void put(int64_t slot, const float* numbers, int64_t width) const {
        const int64_t block = slot / block_size, offset = slot - block * block_size;
        encode_row(kind, numbers, width, rows + block * rows_block_stride + offset * rows_stride,
                   scales + block * scales_block_stride + offset * scales_stride);
    }
};

}  // namespace glm
#endif
