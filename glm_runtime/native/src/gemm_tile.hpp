// The register tile of all matrix products: up to 12 rows of x times one panel of 32 columns of a packed weight.
//
// Panels lie as packed_matrix.py says. Every output element is one chain of fused multiply-adds in the order of k, begun at zero; with
// bf16 on both sides one vdpbf16ps per pair of k. The chain knows nothing of the tile it is computed in, so the number of rows, blocking
// and threads do not change a bit. fp32 x with bf16 weights gives the bits of fp32 x with the same weights in fp32.
#pragma once

#include "simd.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

constexpr int64_t kPanel = 32;     // columns of a panel: two vectors
constexpr int kMaxTileRows = 12;   // 24 accumulators, two weights, one broadcast: what 32 registers hold

// What is multiplied: kinds of x and of the weight.
enum Kind : int64_t { kFp32Bf16 = 0, kFp32Fp32 = 1, kBf16Bf16 = 2 };

inline int64_t x_bytes(Kind kind) { return kind == kBf16Bf16 ? 2 : 4; }
inline int64_t panel_bytes(Kind kind, int64_t inner) { return kind == kFp32Fp32 ? inner * kPanel * 4 : (inner + 1) / 2 * kPanel * 4; }

// Weights that will be needed next are asked for while these are computed: `lines` cache lines for every 128 bytes read.
struct Prefetch {
    const char* from = nullptr;
    int lines = 0;
};

// sums: [R][32]. x: R rows, x_stride numbers apart. One panel, read front to back: more at once gained nothing at 1 row and lost at 2 and
// 3, although two chains of sums are then all there is to fill the units with.
using TileFunction = void (*)(const void* x, int64_t x_stride, const char* panel, int64_t inner, Prefetch prefetch, float* sums);

// The function for a tile of `rows` rows, 1 to 12.
TileFunction tile_function(Kind kind, int64_t rows);

}  // namespace glm
#endif
