// y = x W^T with a packed weight, plain or gated, for one matrix or a stack of them (attention heads).
#include "gemm_block.hpp"

#ifdef GLM_SUPPORTED

// Strides count numbers. x: rows x_stride apart, items x_item apart; out likewise; add (or null) has out's dtype and its own row stride.
// weights: `items` packed matrices of num_outputs x inner. Gated: out has num_outputs / 2 columns.
extern "C" void glm_linear(
    const void* x, int64_t x_stride, int64_t x_item, const void* weights, int64_t kind, int64_t items, int64_t num_outputs, int64_t inner,
    int64_t is_gated, void* out, int64_t out_stride, int64_t out_item, int64_t out_is_bf16, const void* add, int64_t add_stride,
    int64_t num_rows, int64_t max_threads) {
    using namespace glm;
    if (num_rows == 0) return;
    const Matrix matrix{static_cast<const char*>(weights), Kind(kind), num_outputs, inner};
    const int64_t threads = useful_threads(max_threads, items * num_rows * num_outputs * inner), out_bytes = out_is_bf16 ? 2 : 4;
    const Blocks blocks = choose_blocks(num_rows, matrix, items, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t work = 0; work < blocks.count; ++work) {
        const Block block = blocks.at(work);
        const Rows rows{static_cast<const char*>(x) + block.item * x_item * x_bytes(matrix.kind), x_stride};
        const Target target{static_cast<char*>(out) + block.item * out_item * out_bytes, out_stride, out_is_bf16 != 0, is_gated != 0,
                            static_cast<const char*>(add), add_stride};
        multiply_block(rows, matrix.item(block.item), block, target);
    }
}

#endif
