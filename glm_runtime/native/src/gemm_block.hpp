// How a product is cut into blocks of rows and panels, and what happens to the sums of a block.
#pragma once

#include <algorithm>

#include "gemm_tile.hpp"

#ifdef GLM_SUPPORTED
namespace glm {

constexpr int64_t kBlockBytes = 384 << 10;  // of x that stays in the second-level cache while panels pass by
constexpr int64_t kBlocksPerThread = 8;     // fine enough for threads that are not equally fast, coarse enough to stream
constexpr int64_t kAhead = 8192;            // bytes; from 1 to 8 KiB each doubling gained, up to twice the speed at 12 rows
constexpr int64_t kWorthAThread = 50000;    // multiply-adds; below this, waking a thread costs more than it does

struct Matrix {
    const char* weights;
    Kind kind;
    int64_t num_outputs, inner;
    int64_t num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
    int64_t bytes() const { return num_panels() * panel_bytes(kind, inner); }
    Matrix item(int64_t index) const { return {weights + index * bytes(), kind, num_outputs, inner}; }
};

struct Rows {
    const char* x;
    int64_t stride;
};

struct Block {
    int64_t item, row_begin, row_end, panel_begin, panel_end;
};

// A product cut into `count` blocks, in the order: item, rows, panels.
struct Blocks {
    int64_t num_rows, num_panels, rows_each, panels_each, count;
    int64_t panel_blocks() const { return (num_panels + panels_each - 1) / panels_each; }
    int64_t row_blocks() const { return (num_rows + rows_each - 1) / rows_each; }
    Block at(int64_t work) const {
        const int64_t panel = work % panel_blocks() * panels_each, above = work / panel_blocks();
        const int64_t row = above % row_blocks() * rows_each;
        return {above / row_blocks(), row, std::min(row + rows_each, num_rows), panel, std::min(panel + panels_each, num_panels)};
    }
};

inline int64_t useful_threads(int64_t threads, int64_t multiply_adds) { return multiply_adds < 2 * kWorthAThread ? 1 : threads; }

// `items` such products share the threads.
inline Blocks choose_blocks(int64_t num_rows, const Matrix& matrix, int64_t items, int64_t threads) {
    const int64_t tiles = kBlockBytes / (kMaxTileRows * matrix.inner * x_bytes(matrix.kind) + 1);
    Blocks blocks{num_rows, matrix.num_panels(), kMaxTileRows * std::clamp<int64_t>(tiles, 1, 16), 1, 0};
    const int64_t pieces = items * blocks.row_blocks();
    blocks.panels_each = std::max<int64_t>(1, blocks.num_panels * pieces / (threads * kBlocksPerThread));
    blocks.panels_each = std::min(blocks.panels_each, blocks.num_panels);
    blocks.count = pieces * blocks.panel_blocks();
    return blocks;
}

// Where sums go. Rounds: once, to bf16, after `add`. Gated: 16 columns silu(gate) * up per panel.
struct Target {
    char* out;
    int64_t stride;
    bool is_bf16, is_gated;
    const char* add = nullptr;
    int64_t add_stride = 0;
};

inline vec silu(vec x) { return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), x)))); }

inline vec load_lanes(const char* from, bool is_bf16, __mmask16 lanes) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(lanes, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}

inline void store_lanes(char* to, bool is_bf16, __mmask16 lanes, vec value) {
    if (is_bf16) _mm256_mask_storeu_epi16(to, lanes, narrow(value));
    else _mm512_mask_storeu_ps(to, lanes, value);
}

// One vector of sums of one row: columns [column, column + 16) of num_columns.
inline void store_sums(const Target& target, int64_t row, int64_t column, int64_t num_columns, vec value) {
    if (column >= num_columns) return;
    const int64_t size = target.is_bf16 ? 2 : 4;
    const __mmask16 lanes = first_lanes(std::min<int64_t>(kLanes, num_columns - column));
    if (target.add != nullptr) {
        const char* add = target.add + (row * target.add_stride + column) * size;
        value = _mm512_add_ps(load_lanes(add, target.is_bf16, lanes), value);
    }
    store_lanes(target.out + (row * target.stride + column) * size, target.is_bf16, lanes, value);
}

// Sums [rows][32] of the tile that begins at `row`.
inline void store_tile(const float* sums, int64_t rows, int64_t row, int64_t panel, const Matrix& matrix, const Target& target) {
    for (int64_t r = 0; r < rows; ++r, sums += kPanel) {
        const vec first = _mm512_load_ps(sums), second = _mm512_load_ps(sums + kLanes);
        if (target.is_gated) {
            store_sums(target, row + r, panel * kLanes, matrix.num_outputs / 2, _mm512_mul_ps(silu(first), second));
        } else {
            store_sums(target, row + r, panel * kPanel, matrix.num_outputs, first);
            store_sums(target, row + r, panel * kPanel + kLanes, matrix.num_outputs, second);
        }
    }
}

// All rows of the block times all its panels; each panel's weights are read from memory once.
inline void multiply_block(const Rows& rows, const Matrix& matrix, const Block& block, const Target& target) {
    const int64_t count = block.row_end - block.row_begin, tiles = (count + kMaxTileRows - 1) / kMaxTileRows;
    const int64_t stride = panel_bytes(matrix.kind, matrix.inner);
    alignas(64) float sums[kMaxTileRows * kPanel];
    for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
        const char* weights = matrix.weights + panel * stride;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = block.row_begin + tile * count / tiles, end = block.row_begin + (tile + 1) * count / tiles;
            Prefetch prefetch;
            if (tiles == 1) prefetch = {weights + kAhead, 2};
            else if (panel + 1 < block.panel_end) prefetch = {weights + stride + tile * stride / tiles, 1};
            const char* x = rows.x + begin * rows.stride * x_bytes(matrix.kind);
            tile_function(matrix.kind, end - begin)(x, rows.stride, weights, matrix.inner, prefetch, sums);
            store_tile(sums, end - begin, begin, panel, matrix, target);
        }
    }
}

}  // namespace glm
#endif
