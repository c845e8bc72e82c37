"""The specification of the index scores.

Legend: `R` sequences, `t` rows of each, `H` index heads, `D` index head dim, `S` = B x block_size context tokens.
"""

import torch
from torch import Tensor


def index_logits(queries: Tensor, weights: Tensor, blocks: Tensor, block_tables: Tensor, positions: Tensor) -> Tensor:
    """score[t, s] = sum_h w[t, h] * ReLU(q[t, h] . k[s]) for s <= position(t), else -inf. Source: GlmMoeDsaIndexer, FACTS 3.5.

    The factors H^-1/2 and D^-1/2 are in `weights` (positive, so they may cross the ReLU; the signed weight itself may not).
    queries: [R, t, H, D]; weights: [R, t, H] fp32; blocks: [P, block_size, D], any outer stride; block_tables: [R, B] int64;
    positions: [R, t] int64. Returns [R, t, S] fp32, new. Keys beyond a row's position may hold anything, NaN included.
    Rounds: nothing below fp32; keys are read as the cache stores them.
    """
    num_sequences, num_rows = positions.shape
    keys = blocks[block_tables].flatten(1, 2).float()  # [R, S, D]
    scores = torch.full((num_sequences, num_rows, keys.shape[1]), float("-inf"))
    for sequence in range(num_sequences):
        for row in range(num_rows):
            visible = keys[sequence, : positions[sequence, row] + 1]
            dots = torch.einsum("hd,sd->hs", queries[sequence, row].float(), visible)
            scores[sequence, row, : visible.shape[0]] = torch.einsum("h,hs->s", weights[sequence, row], dots.relu())
    return scores
