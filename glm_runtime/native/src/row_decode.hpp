// Cached rows as numbers, for every format of `row_format.py`. Contract: `ops/cache_rows/reference.py`, bit for bit.
#pragma once

#include <cmath>

#include "simd.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The order of RowKind in `native/cached_rows.py`.
enum class RowKind : int64_t { bf16, fp32, fp8_e4m3, fp8_ds_mla, nvfp4_ds_mla, index_fp8_fp32, index_fp8_ue8m0, index_mxfp4 };

// bf16 of the 128 magnitudes of e4m3; every one of them is exact.
struct E4m3Numbers {
    alignas(64) bf16 of_code[128];
    E4m3Numbers() {
        for (int code = 0; code < 128; ++code) {
            const int exponent = code >> 3, mantissa = code & 7;
            const float number = exponent ? std::ldexp(8.0f + float(mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
            of_code[code] = code == 127 ? bf16(0x7fc0) : narrow(number);
        }
    }
};
inline const E4m3Numbers kE4m3;

// 32 codes to 32 bf16, by two tables of 64.
inline __m512i e4m3_to_bf16(__m256i codes) {
    const __m512i wide = _mm512_cvtepu8_epi16(codes);
    const __m512i* table = reinterpret_cast<const __m512i*>(kE4m3.of_code);
    const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), wide, _mm512_load_si512(table + 1));
    const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 2), wide, _mm512_load_si512(table + 3));
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40)), low, high);
    return _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8));
}

inline vec widen_low(__m512i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves)), 16));
}
inline vec widen_high(__m512i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1)), 16));
}

inline float e4m3_number(uint8_t code) { return widen(bf16(kE4m3.of_code[code & 127] | (code & 0x80) << 8)); }

// 2^(code - 127); 255 is NaN.
inline float ue8m0_number(uint8_t code) {
    const uint32_t bits = code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : uint32_t(code) << 23;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

// 16 e2m1 codes, two to a byte, the even one in the low nibble.
inline vec e2m1_numbers(const uint8_t* packed) {
    const vec table = _mm512_setr_ps(  //
        0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)), table);
}

// Where numbers go: fp32, or bf16 (exact for all formats but scales that are no powers of two, and fp32).
inline void put(float* out, vec x) { _mm512_storeu_ps(out, x); }
inline void put(bf16* out, vec x) { store_bf16(out, x); }
inline void put32(float* out, __m512i halves) {
    _mm512_storeu_ps(out, widen_low(halves));
    _mm512_storeu_ps(out + 16, widen_high(halves));
}
inline void put32(bf16* out, __m512i halves) { _mm512_storeu_si512(out, halves); }

// `width` bf16 numbers, then zeros up to a multiple of 32.
template <class Number>
inline void decode_halves(const bf16* stored, int64_t width, Number* out) {
    for (int64_t i = 0; i < width; i += 32) {
        const __mmask32 lanes = width - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (width - i)) - 1;
        put32(out + i, _mm512_maskz_loadu_epi16(lanes, stored + i));
    }
}

template <class Number>
inline void decode_codes(const uint8_t* stored, int64_t width, Number* out) {
    for (int64_t i = 0; i < width; i += 32) {
        const __mmask32 lanes = width - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (width - i)) - 1;
        put32(out + i, e4m3_to_bf16(_mm256_maskz_loadu_epi8(lanes, stored + i)));
    }
}

inline float load_float(const uint8_t* bytes) {
    float number;
    std::memcpy(&number, bytes, 4);
    return number;
}

// One stored row as `width` numbers, then zeros up to a multiple of 32. FP8 index keys without their scale (`index_factor`).
template <class Number>
inline void decode_row(RowKind kind, const uint8_t* row, const uint8_t* scales, int64_t width, Number* out) {
    switch (kind) {
        case RowKind::bf16:
            decode_halves(reinterpret_cast<const bf16*>(row), width, out);
            return;
        case RowKind::fp32:
            for (int64_t i = 0; i < round_up(width, 32); i += kLanes) {
                const int64_t left = width - i;
                const __mmask16 lanes = left >= kLanes ? __mmask16(0xffff) : left > 0 ? first_lanes(left) : __mmask16(0);
                put(out + i, _mm512_maskz_loadu_ps(lanes, row + 4 * i));
            }
            return;
        case RowKind::fp8_ds_mla:
            for (int64_t i = 0; i < 512; i += 32) {
                const vec scale = _mm512_set1_ps(load_float(row + 512 + 4 * (i / 128)));
                const __m512i halves = e4m3_to_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)));
                put(out + i, _mm512_mul_ps(widen_low(halves), scale));
                put(out + i + 16, _mm512_mul_ps(widen_high(halves), scale));
            }
            decode_halves(reinterpret_cast<const bf16*>(row + 528), 64, out + 512);
            return;
        case RowKind::nvfp4_ds_mla:
            for (int64_t j = 0; j < 32; ++j) {
                const vec scale = _mm512_set1_ps(e4m3_number(row[320 + 8 * (j % 4) + j / 4]));
                put(out + 16 * j, _mm512_mul_ps(e2m1_numbers(row + 8 * j), scale));
            }
            decode_codes(row + 256, 64, out + 512);
            return;
        case RowKind::index_mxfp4:
            for (int64_t j = 0; j < 8; ++j)
                put(out + 16 * j, _mm512_mul_ps(e2m1_numbers(row + 8 * j), _mm512_set1_ps(ue8m0_number(scales[j / 2]))));
            return;
        default:
            decode_codes(row, width, out);
    }
}

// What an FP8 index key leaves to the reader; 1 for other formats.
inline float index_factor(RowKind kind, const uint8_t* scales) {
    if (kind == RowKind::index_fp8_fp32) return load_float(scales);
    return kind == RowKind::index_fp8_ue8m0 ? ue8m0_number(scales[0]) : 1.0f;
}

inline bool has_factor(RowKind kind) { return kind == RowKind::index_fp8_fp32 || kind == RowKind::index_fp8_ue8m0; }

}  // namespace glm
#endif
