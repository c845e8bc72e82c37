// The k best of a row of scores. Contract: ops/select_topk/reference.py.
#pragma once

#include "tiles.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

// Scores as integers in the order of the contract: -0 equals +0, NaN is 0, below -inf. In place if both pointers are equal.
inline void rank_scores(const float* scores, int64_t count, uint32_t* ranks) {
    const __m512i sign = _mm512_set1_epi32(int(0x80000000u));
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 lanes = count - i >= kLanes ? __mmask16(0xffff) : first_lanes(count - i);
        const vec score = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, scores + i), _mm512_setzero_ps());
        const __m512i bits = _mm512_castps_si512(score);
        const __m512i flips = _mm512_or_si512(_mm512_srai_epi32(bits, 31), sign);
        const __mmask16 numbers = _mm512_cmp_ps_mask(score, score, _CMP_ORD_Q);
        _mm512_mask_storeu_epi32(ranks + i, lanes, _mm512_maskz_xor_epi32(numbers, bits, flips));
    }
}

inline int64_t count_from(const uint32_t* ranks, int64_t count, uint32_t threshold) {
    const __m512i least = _mm512_set1_epi32(int(threshold));
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 lanes = count - i >= kLanes ? __mmask16(0xffff) : first_lanes(count - i);
        found += __builtin_popcount(_mm512_mask_cmpge_epu32_mask(lanes, _mm512_maskz_loadu_epi32(lanes, ranks + i), least));
    }
    return found;
}

// The greatest rank that at least k of the `count` ranks reach, count >= k, found bit by bit.
inline uint32_t find_threshold(const uint32_t* ranks, int64_t count, int64_t k) {
    uint32_t threshold = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        const int64_t found = count_from(ranks, count, threshold | bit);
        if (found >= k) threshold |= bit;
        if (found == k) break;
    }
    return threshold;
}

// list[k] = positions of the k best, ascending; of equal ranks the first ones.
inline void list_best(const uint32_t* ranks, int64_t count, int64_t k, int64_t* list) {
    const uint32_t threshold = find_threshold(ranks, count, k);
    int64_t ties = k - (threshold == 0xffffffffu ? 0 : count_from(ranks, count, threshold + 1));
    const __m512i least = _mm512_set1_epi32(int(threshold));
    const __m512i offsets = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t listed = 0;
    for (int64_t i = 0; i < count && listed < k; i += kLanes) {
        const __mmask16 lanes = count - i >= kLanes ? __mmask16(0xffff) : first_lanes(count - i);
        const __m512i block = _mm512_maskz_loadu_epi32(lanes, ranks + i);
        uint32_t equal = _mm512_mask_cmpeq_epu32_mask(lanes, block, least);
        if (__builtin_popcount(equal) > ties) equal = _pdep_u32((1u << ties) - 1, equal);
        ties -= __builtin_popcount(equal);
        const __mmask16 chosen = __mmask16(equal | _mm512_mask_cmpgt_epu32_mask(lanes, block, least));
        alignas(64) int32_t positions[kLanes];
        _mm512_store_si512(positions, _mm512_maskz_compress_epi32(chosen, _mm512_add_epi32(offsets, _mm512_set1_epi32(int(i)))));
        for (int j = 0; j < __builtin_popcount(chosen); ++j) list[listed++] = positions[j];
    }
}

// The score of a rank, 0 for -0; NaN for 0.
inline float score_of(uint32_t rank) {
    const uint32_t bits = rank & 0x80000000u ? rank ^ 0x80000000u : rank ? ~rank : 0x7fc00000u;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// best[width] = the scores of list[width], -inf where it is -1.
inline void score_list(const uint32_t* ranks, const int64_t* list, int64_t width, float* best) {
    for (int64_t i = 0; i < width; ++i) best[i] = list[i] < 0 ? -INFINITY : score_of(ranks[list[i]]);
}

inline void list_all(int64_t visible, int64_t width, int64_t* list) {
    for (int64_t i = 0; i < width; ++i) list[i] = i < visible ? i : -1;
}

}  // namespace glm
#endif
