// What a layer writes into its caches: norms and rotations of the A-projection, and the stores. Contract: `ops/fused_norm_rope`.
// A row is computed by one thread from itself alone.
#include <algorithm>
#include <vector>

#include "row_encode.hpp"
#include "rows.hpp"

#ifdef GLM_SUPPORTED
using namespace glm;

namespace {

// Keeps what it is given as the numbers will read once stored in the runtime's dtype.
Numbers floats(float* buffer) { return Numbers(buffer, false); }

void round_row(float* numbers, int64_t width, Numbers like) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = lanes_at(i, width);
        floats(numbers).store(i, like.rounded(floats(numbers).load(i, lanes)), lanes);
    }
}

// e' = e cos - o sin, o' = o cos + e sin for neighbouring pairs, two products and a sum each. In place is allowed.
void rotate_row(Numbers x, const float* cosines, const float* sines, float* out, int64_t width) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const vec even_is_negative = _mm512_castsi512_ps(_mm512_set1_epi64(0x80000000));
    for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = lanes_at(i, width);
        const __mmask8 pairs = __mmask8(width - i >= kLanes ? 0xff : (1u << ((width - i) / 2)) - 1u);
        const vec c = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_maskz_loadu_ps(pairs, cosines + i / 2)));
        const vec s = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_maskz_loadu_ps(pairs, sines + i / 2)));
        const vec straight = x.load(i, lanes), crossed = _mm512_permute_ps(straight, 0xb1);
        const vec turned = _mm512_mul_ps(crossed, _mm512_xor_ps(s, even_is_negative));
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_add_ps(_mm512_mul_ps(straight, c), turned));
    }
}

// y = (x - mean) / sqrt(var + eps) * w + b.
void layer_norm_row(Numbers x, Numbers weight, Numbers bias, float* y, int64_t width, float eps) {
    const float mean = sum_row(width, [&](int64_t i, __mmask16 lanes) { return x.load(i, lanes); }) / float(width);
    const vec means = _mm512_set1_ps(mean);
    const float squares = sum_row(width, [&](int64_t i, __mmask16 lanes) {
        const vec centred = _mm512_maskz_sub_ps(lanes, x.load(i, lanes), means);
        return _mm512_mul_ps(centred, centred);
    });
    const vec scale = _mm512_set1_ps(1.0f / std::sqrt(squares / float(width) + eps));
    for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = lanes_at(i, width);
        const vec normed = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(x.load(i, lanes), means), scale), weight.load(i, lanes));
        _mm512_mask_storeu_ps(y + i, lanes, _mm512_add_ps(normed, bias.load(i, lanes)));
    }
}

void copy_row(const float* numbers, Numbers out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) out.store(i, _mm512_loadu_ps(numbers + i), lanes_at(i, width));
}

// In the order of `described_region` in `ops/cache_rows/native.py`.
Region region_of(const int64_t* described) {
    return Region{RowKind(described[6]),
                  described[7],
                  reinterpret_cast<uint8_t*>(described[0]),
                  described[1],
                  described[2],
                  reinterpret_cast<uint8_t*>(described[3]),
                  described[4],
                  described[5]};
}

}  // namespace

// The four program kinds for each row. Absent, as null: index keys, a region, materialised outputs, lists to clear.
// projected [rows, q_rank + kv_rank + rope_dim], raw_keys [rows, index_width]: is_bf16. All norms' weights: weights_are_bf16.
extern "C" void glm_fused_norm_rope(const void* projected, int64_t projected_stride, const void* raw_keys, int64_t raw_keys_stride,
                                    int64_t is_bf16, const void* q_weight, const void* kv_weight, const void* key_weight,
                                    const void* key_bias, int64_t weights_are_bf16, const float* cosines, const float* sines,
                                    const int64_t* slots, const int64_t* mla, const int64_t* index, void* query_latent, void* key_rows,
                                    void* index_rows, void* lists, int64_t lists_stride_bytes, int64_t lists_row_bytes, int64_t rows,
                                    int64_t q_rank, int64_t kv_rank, int64_t rope_dim, int64_t index_width, float eps, float key_eps) {
    const int64_t key_width = kv_rank + rope_dim, half = rope_dim / 2;
#pragma omp parallel if (rows * (q_rank + key_width + index_width) > kWorthThreads)
    {
        std::vector<float> buffer((key_width > index_width ? key_width : index_width) + kLanes);
        float* const numbers = buffer.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t slot = slots[row];
            const Numbers x = Numbers(projected, is_bf16).at(row * projected_stride);
            rms_norm_row(x, Numbers(q_weight, weights_are_bf16), Numbers(query_latent, is_bf16).at(row * q_rank), q_rank, eps);
            if (lists != nullptr) std::memset(static_cast<char*>(lists) + row * lists_stride_bytes, 0xff, lists_row_bytes);
            if (slot >= 0 || key_rows != nullptr) {
                rms_norm_row(x.at(q_rank), Numbers(kv_weight, weights_are_bf16), floats(numbers), kv_rank, eps);
                rotate_row(x.at(q_rank + kv_rank), cosines + row * half, sines + row * half, numbers + kv_rank, rope_dim);
                round_row(numbers, key_width, x);
                if (key_rows != nullptr) copy_row(numbers, Numbers(key_rows, is_bf16).at(row * key_width), key_width);
                if (slot >= 0 && mla != nullptr) region_of(mla).put(slot, numbers, key_width);
            }
            if (raw_keys == nullptr) continue;
            if (slot >= 0) {
                const Numbers raw = Numbers(raw_keys, is_bf16).at(row * raw_keys_stride);
                const Numbers weight(key_weight, weights_are_bf16), bias(key_bias, weights_are_bf16);
                layer_norm_row(raw, weight, bias, numbers, index_width, key_eps);
                round_row(numbers, index_width, raw);
                rotate_row(floats(numbers), cosines + row * half, sines + row * half, numbers, rope_dim);
                round_row(numbers, rope_dim, raw);
                if (index != nullptr) region_of(index).put(slot, numbers, index_width);
            } else if (index_rows != nullptr) {
                std::fill(numbers, numbers + index_width, 0.0f);
            }
            if (index_rows != nullptr) copy_row(numbers, Numbers(index_rows, is_bf16).at(row * index_width), index_width);
        }
    }
}

// Rows of numbers into a region; a negative slot stores nothing.
extern "C" void glm_store_rows(const void* values, int64_t stride, int64_t is_bf16, const int64_t* slots, const int64_t* region,
                               int64_t rows, int64_t width) {
    const Region stored = region_of(region);
#pragma omp parallel if (rows * width > kWorthThreads)
    {
        std::vector<float> buffer(width + kLanes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            if (slots[row] < 0) continue;
            const Numbers x = Numbers(values, is_bf16).at(row * stride);
            for (int64_t i = 0; i < width; i += kLanes) floats(buffer.data()).store(i, x.load(i, lanes_at(i, width)), lanes_at(i, width));
            stored.put(slots[row], buffer.data(), width);
        }
    }
}
#endif
