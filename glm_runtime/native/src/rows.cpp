// Norms of whole rows: with the residual's sum before them, and the pair of norms in front of the MTP layer.
// A row is computed by one thread from itself alone.
#include "rows.hpp"

#ifdef GLM_SUPPORTED
using namespace glm;

// h = residual + owed, each sum rounded as the stream is; y = h / rms(h) * weight. Without summands h is the residual, not written.
extern "C" void glm_add_rms_norm(const void* residual, int64_t residual_stride, const void* first, int64_t first_stride,
                                 int64_t first_is_bf16, const void* second, int64_t second_stride, int64_t second_is_bf16,
                                 const void* weight, int64_t weight_is_bf16, void* h, void* y, int64_t is_bf16, int64_t rows,
                                 int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > kWorthThreads)
    for (int64_t row = 0; row < rows; ++row) {
        const Numbers x = Numbers(residual, is_bf16).at(row * residual_stride);
        const Numbers normed = Numbers(y, is_bf16).at(row * width), weights(weight, weight_is_bf16);
        if (first == nullptr) {
            rms_norm_row(x, weights, normed, width, eps);
            continue;
        }
        const Numbers one = Numbers(first, first_is_bf16).at(row * first_stride);
        const Numbers two = Numbers(second, second_is_bf16).at(row * second_stride);
        const Numbers sum = Numbers(h, is_bf16).at(row * width);
        const float squares = sum_row(width, [&](int64_t i, __mmask16 lanes) {
            vec owed = sum.rounded(one.load(i, lanes));
            if (second != nullptr) owed = sum.rounded(_mm512_add_ps(owed, sum.rounded(two.load(i, lanes))));
            const vec total = sum.rounded(_mm512_add_ps(x.load(i, lanes), owed));
            sum.store(i, total, lanes);
            return _mm512_mul_ps(total, total);
        });
        scale_row(sum, 1.0f / std::sqrt(squares / float(width) + eps), weights, normed, width);
    }
}

// [RMS(embedding[token]) | RMS(hidden)]; the embedding of position 0 is zero.
extern "C" void glm_embed_eh_norm(const int64_t* tokens, const int64_t* positions, const void* hidden, int64_t hidden_stride,
                              const void* embedding, int64_t embedding_is_bf16, const void* e_weight, const void* h_weight,
                              int64_t weights_are_bf16, void* out, int64_t is_bf16, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > kWorthThreads)
    for (int64_t row = 0; row < rows; ++row) {
        const Numbers left = Numbers(out, is_bf16).at(2 * row * width);
        if (positions[row] == 0) {
            for (int64_t i = 0; i < width; i += kLanes) left.store(i, _mm512_setzero_ps(), lanes_at(i, width));
        } else {
            const Numbers embedded = Numbers(embedding, embedding_is_bf16).at(tokens[row] * width);
            rms_norm_row(embedded, Numbers(e_weight, weights_are_bf16), left, width, eps);
        }
        const Numbers x = Numbers(hidden, is_bf16).at(row * hidden_stride);
        rms_norm_row(x, Numbers(h_weight, weights_are_bf16), left.at(width), width, eps);
    }
}
#endif
