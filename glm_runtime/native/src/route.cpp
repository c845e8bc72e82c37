// Choices by size: the router's experts, and the best token of a vocabulary shard. A row is chosen by one thread from itself alone.
#include <algorithm>
#include <vector>

#include "rows.hpp"

#ifdef GLM_SUPPORTED
using namespace glm;

namespace {

constexpr int32_t kTaken = INT32_MIN;

// Integers in the order of the floats: -0 equals +0, NaN is the largest, nothing is kTaken.
__m512i order_keys(vec x) {
    const __m512i bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    const __m512i keys = _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), keys, _mm512_set1_epi32(INT32_MAX));
}

// The largest of `count` keys, of equal ones the first; it is taken. `keys` is padded with kTaken to a multiple of 16.
int64_t take_largest(int32_t* keys, int64_t count) {
    __m512i largest = _mm512_set1_epi32(kTaken);
    for (int64_t i = 0; i < count; i += kLanes) largest = _mm512_max_epi32(largest, _mm512_loadu_si512(keys + i));
    const __m512i wanted = _mm512_set1_epi32(_mm512_reduce_max_epi32(largest));
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 found = _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(keys + i), wanted);
        if (found == 0) continue;
        const int64_t at = i + __builtin_ctz(found);
        keys[at] = kTaken;
        return at;
    }
    return 0;
}

struct Router {
    int64_t experts, chosen, groups, chosen_groups;
    bool is_normalised;
    float scale;
};

int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

void fill_keys(const float* numbers, int64_t count, int32_t* keys) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 lanes = lanes_at(i, count);
        const __m512i found = order_keys(_mm512_maskz_loadu_ps(lanes, numbers + i));
        _mm512_storeu_si512(keys + i, _mm512_mask_blend_epi32(lanes, _mm512_set1_epi32(kTaken), found));
    }
}

// Experts of groups that are not among the best become -inf. A group's score is the sum of its two largest.
void drop_groups(const Router& router, float* biased, int32_t* keys, std::vector<float>& group_scores, std::vector<char>& is_kept) {
    const int64_t size = router.experts / router.groups;
    for (int64_t group = 0; group < router.groups; ++group) {
        const float* members = biased + group * size;
        fill_keys(members, size, keys);
        const float first = members[take_largest(keys, size)];
        group_scores[group] = size > 1 ? first + members[take_largest(keys, size)] : first;
    }
    fill_keys(group_scores.data(), router.groups, keys);
    std::fill(is_kept.begin(), is_kept.end(), 0);
    for (int64_t kept = 0; kept < router.chosen_groups; ++kept) is_kept[take_largest(keys, router.groups)] = 1;
    for (int64_t expert = 0; expert < router.experts; ++expert)
        if (!is_kept[expert / size]) biased[expert] = -INFINITY;
}

}  // namespace

// s = sigmoid(logits); chosen = the largest of s + bias, ascending by number; gates = s[chosen] / (sum + 1e-20) * scale.
extern "C" void glm_moe_route(const float* logits, int64_t logits_stride, const float* bias, const int64_t* forced, int64_t* chosen,
                              float* gates, int64_t rows, int64_t experts, int64_t num_chosen, int64_t groups, int64_t chosen_groups,
                              int64_t is_normalised, float scale) {
    const Router router{experts, num_chosen, groups, chosen_groups, is_normalised != 0, scale};
#pragma omp parallel if (rows * experts > kWorthThreads)
    {
        std::vector<float> scores(padded(experts)), biased(padded(experts)), group_scores(groups);
        std::vector<int32_t> keys(padded(std::max(experts, groups)));
        std::vector<char> is_kept(groups);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            int64_t* const mine = chosen + row * num_chosen;
            float* const weights = gates + row * num_chosen;
            const vec one = _mm512_set1_ps(1.0f);
            for (int64_t i = 0; i < experts; i += kLanes) {
                const __mmask16 lanes = lanes_at(i, experts);
                const vec negative = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_maskz_loadu_ps(lanes, logits + row * logits_stride + i));
                const vec score = _mm512_div_ps(one, _mm512_add_ps(one, glm::exp(negative)));
                _mm512_storeu_ps(scores.data() + i, score);
                _mm512_storeu_ps(biased.data() + i, _mm512_add_ps(score, _mm512_maskz_loadu_ps(lanes, bias + i)));
            }
            if (forced != nullptr && forced[row * num_chosen] >= 0) {
                std::copy(forced + row * num_chosen, forced + (row + 1) * num_chosen, mine);
            } else {
                if (groups > 1) drop_groups(router, biased.data(), keys.data(), group_scores, is_kept);
                fill_keys(biased.data(), experts, keys.data());
                for (int64_t j = 0; j < num_chosen; ++j) mine[j] = take_largest(keys.data(), experts);
            }
            std::sort(mine, mine + num_chosen);
            float total = 0.0f;
            for (int64_t j = 0; j < num_chosen; ++j) total += weights[j] = scores[mine[j]];
            const float divisor = router.is_normalised ? total + 1e-20f : 1.0f;
            for (int64_t j = 0; j < num_chosen; ++j) weights[j] = weights[j] / divisor * scale;
        }
    }
}

// Of each row the largest number, its place (of equal ones the first; a NaN beats all numbers), and whether all are finite.
extern "C" void glm_vocab_argmax(const void* logits, int64_t stride, int64_t is_bf16, float* values, int64_t* places, uint8_t* is_finite,
                                 int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width > kWorthThreads)
    for (int64_t row = 0; row < rows; ++row) {
        const Numbers x = Numbers(logits, is_bf16).at(row * stride);
        vec best = _mm512_set1_ps(-INFINITY);
        __m512i best_places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), at = best_places;
        __mmask16 is_strange = 0;
        int64_t first_nan = -1;
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 lanes = lanes_at(i, width);
            const vec numbers = x.load(i, lanes);
            const __mmask16 larger = _mm512_mask_cmp_ps_mask(lanes, numbers, best, _CMP_GT_OQ);
            best = _mm512_mask_blend_ps(larger, best, numbers);
            best_places = _mm512_mask_blend_epi32(larger, best_places, at);
            at = _mm512_add_epi32(at, _mm512_set1_epi32(kLanes));
            const __mmask16 strange = _mm512_mask_fpclass_ps_mask(lanes, numbers, 0x01 | 0x08 | 0x10 | 0x80);
            if (strange == 0) continue;
            is_strange |= strange;
            const __mmask16 is_nan = _mm512_mask_cmp_ps_mask(lanes, numbers, numbers, _CMP_UNORD_Q);
            if (is_nan != 0 && first_nan < 0) first_nan = i + __builtin_ctz(is_nan);
        }
        const float largest = _mm512_reduce_max_ps(best);
        const __mmask16 equal = _mm512_cmp_ps_mask(best, _mm512_set1_ps(largest), _CMP_EQ_OQ);
        values[row] = first_nan < 0 ? largest : NAN;
        places[row] = first_nan < 0 ? int64_t(_mm512_mask_reduce_min_epi32(equal, best_places)) : first_nan;
        is_finite[row] = is_strange == 0;
    }
}

extern "C" void glm_top_probability(const void* logits, int64_t stride, int64_t is_bf16, const float* largest, float* probabilities,
                                    int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width > kWorthThreads)
    for (int64_t row = 0; row < rows; ++row) {
        const Numbers x = Numbers(logits, is_bf16).at(row * stride);
        const vec best = _mm512_set1_ps(largest[row]);
        vec sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 lanes = lanes_at(i, width);
            sum = _mm512_mask_add_ps(sum, lanes, sum, exp(_mm512_sub_ps(x.load(i, lanes), best)));
        }
        probabilities[row] = 1.0f / sum_lanes(sum);
    }
}
#endif
