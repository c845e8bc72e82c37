"""Index scores in tiles of keys, one batched matrix product per tile. Contract: `reference.py`.

Each score depends on its own row and key only: the product's columns are always one whole tile, with a key always in the same
column; its rows are padded by `gemm`; heads are summed in order.
"""

import torch
from torch import Tensor

from glm_runtime.linear import Gemm

KEY_TILE_TOKENS = 512
"""Large enough for the BLAS (measured: 100 GFLOP/s a core from 256 on), small enough that short contexts pad little."""


def index_logits(queries: Tensor, weights: Tensor, blocks: Tensor, block_tables: Tensor, positions: Tensor, gemm: Gemm) -> Tensor:
    """Contract: `reference.index_logits`; S must be a multiple of KEY_TILE_TOKENS."""
    num_sequences, num_rows, num_heads, width = queries.shape
    block_size = blocks.shape[1]
    context = block_tables.shape[1] * block_size
    flat_queries = queries.float().reshape(num_sequences, num_rows * num_heads, width)
    scores = torch.empty(num_sequences, num_rows, context)
    tile_blocks = KEY_TILE_TOKENS // block_size
    for tile in range(context // KEY_TILE_TOKENS):
        block_ids = block_tables[:, tile * tile_blocks : (tile + 1) * tile_blocks].reshape(-1)
        keys = blocks.index_select(0, block_ids).float().view(num_sequences, KEY_TILE_TOKENS, width)
        dots = gemm.matmul(flat_queries, keys.transpose(1, 2)).relu_()  # [R, t * H, tile]
        dots = dots.view(num_sequences, num_rows, num_heads, KEY_TILE_TOKENS).mul_(weights[..., None])
        target = scores[:, :, tile * KEY_TILE_TOKENS : (tile + 1) * KEY_TILE_TOKENS]
        target.copy_(dots[:, :, 0])
        for head in range(1, num_heads):
            target.add_(dots[:, :, head])
    return scores.masked_fill_(torch.arange(context) > positions[..., None], float("-inf"))
