// Whole blocks of cached rows as numbers. Contract: ops/cache_rows, `load_blocks`, for formats of one plane.
#include "row_decode.hpp"

#ifdef GLM_SUPPORTED
namespace {
using namespace glm;

constexpr int64_t kWidest = 4096;

template <class Number>
void load(const uint8_t* rows, int64_t block_bytes, int64_t token_bytes, RowKind kind, int64_t block_size, const int64_t* blocks,
          int64_t num_tokens, int64_t width, Number* out) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < num_tokens; ++token) {
        Number decoded[kWidest];  // whole vectors are written, a row of `out` need not be a multiple of them
        decode_row(kind, rows + blocks[token / block_size] * block_bytes + token % block_size * token_bytes, nullptr, width, decoded);
        std::memcpy(out + token * width, decoded, size_t(width) * sizeof(Number));
    }
}

}  // namespace

// The first num_tokens rows of the listed blocks; out [num_tokens, width] fp32 or bf16, width <= 4064.
extern "C" void glm_load_blocks(const void* rows, int64_t block_bytes, int64_t token_bytes, int64_t kind, int64_t block_size,
                                const int64_t* blocks, int64_t num_tokens, int64_t width, int64_t writes_bf16, void* out) {
    const uint8_t* first = static_cast<const uint8_t*>(rows);
    if (writes_bf16)
        load(first, block_bytes, token_bytes, RowKind(kind), block_size, blocks, num_tokens, width, static_cast<bf16*>(out));
    else
        load(first, block_bytes, token_bytes, RowKind(kind), block_size, blocks, num_tokens, width, static_cast<float*>(out));
}
#endif
