"""The specification of the index scores.

Legend: `R` sequences, `t` rows of each, `H` index heads, `D` index head dim, `S` = B x block_size context tokens.
"""

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import load_blocks
from glm_runtime.paged_cache import CacheRegion


def index_logits(queries: Tensor, weights: Tensor, keys: CacheRegion, block_tables: Tensor, positions: Tensor) -> Tensor:
    """score[t, s] = s_k * sum_h w[t, h] * ReLU(q[t, h] . k[s]) for s <= position(t), else -inf. Source: GlmMoeDsaIndexer, FACTS 3.5.

    k[s] are the stored numbers; s_k is the scale that FP8 keys leave to the reader, 1 for all others (`cache_rows`).
    The factors H^-1/2 and D^-1/2 are in `weights` (positive, so they may cross the ReLU; the signed weight itself may not).
    queries: [R, t, H, D]; weights: [R, t, H] fp32; keys: a region of index keys; block_tables: [R, B] int64;
    positions: [R, t] int64. Returns [R, t, S] fp32, new. Keys beyond a row's position may hold anything, NaN included.
    Rounds: nothing below fp32; keys are read as the cache stores them.
    """
    num_sequences, num_rows = positions.shape
    numbers, scales = load_blocks(keys, block_tables.flatten())
    stored = numbers.view(num_sequences, -1, numbers.shape[1])  # [R, S, D]
    factors = torch.ones(stored.shape[:2]) if scales is None else scales.view(num_sequences, -1)  # [R, S]
    scores = torch.full((num_sequences, num_rows, stored.shape[1]), float("-inf"))
    for sequence in range(num_sequences):
        for row in range(num_rows):
            visible = stored[sequence, : positions[sequence, row] + 1]
            dots = torch.einsum("hd,sd->hs", queries[sequence, row].float(), visible)
            weighed = torch.einsum("h,hs->s", weights[sequence, row], dots.relu())
            scores[sequence, row, : visible.shape[0]] = factors[sequence, : visible.shape[0]] * weighed
    return scores
