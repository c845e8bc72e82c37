"""Index scores in tiles of keys, one batched matrix product per tile. Contract: `reference.py`.

Each score depends on its own row and key only: the product's columns are always one whole tile, with a key always in the same
column; its rows are padded by `gemm`; heads are summed in order.
"""

import torch
from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.cache_rows import load_blocks
from glm_runtime.paged_cache import CacheRegion

KEY_TILE_TOKENS = 512
"""Large enough for the BLAS (measured: 100 GFLOP/s a core from 256 on), small enough that short contexts pad little."""

_DOTS_AT_ONCE = 1024
"""Rows of one product: with a tile of keys 2 MB of dots, which stay in the cache for the four passes over them."""


def index_logits(queries: Tensor, weights: Tensor, keys: CacheRegion, block_tables: Tensor, positions: Tensor, gemm: Products) -> Tensor:
    """Contract: `reference.index_logits`; S must be a multiple of KEY_TILE_TOKENS."""
    num_sequences, num_rows, num_heads, width = queries.shape
    block_size = keys.block_size_tokens
    context = block_tables.shape[1] * block_size
    scores = torch.empty(num_sequences, num_rows, context)
    tile_blocks = KEY_TILE_TOKENS // block_size
    row_step = max(1, _DOTS_AT_ONCE // (num_sequences * num_heads))
    for tile in range(context // KEY_TILE_TOKENS):
        block_ids = block_tables[:, tile * tile_blocks : (tile + 1) * tile_blocks].reshape(-1)
        numbers, scales = load_blocks(keys, block_ids)
        stored = numbers.view(num_sequences, KEY_TILE_TOKENS, width).transpose(1, 2)
        columns = slice(tile * KEY_TILE_TOKENS, (tile + 1) * KEY_TILE_TOKENS)
        for first in range(0, num_rows, row_step):
            rows = slice(first, first + row_step)
            _score_tile(scores[:, rows, columns], queries[:, rows].float(), weights[:, rows], stored, gemm)
        if scales is not None:
            scores[:, :, columns].mul_(scales.view(num_sequences, 1, KEY_TILE_TOKENS))
    return scores.masked_fill_(torch.arange(context) > positions[..., None], float("-inf"))


def _score_tile(scores: Tensor, queries: Tensor, weights: Tensor, keys: Tensor, gemm: Products) -> None:
    """scores [R, t, tile] = weighed sum over heads of the rectified dots of queries [R, t, H, D] and keys [R, D, tile]."""
    num_heads = queries.shape[2]
    dots = gemm.matmul(queries.flatten(1, 2), keys).relu_()  # [R, t * H, tile]
    dots = dots.view(queries.shape[0], queries.shape[1], num_heads, -1).mul_(weights[..., None])
    scores.copy_(dots[:, :, 0])
    for head in range(1, num_heads):
        scores.add_(dots[:, :, head])
