"""Top-k over 64-bit keys that are all different, so that any selection algorithm gives the one right answer.

key = (score as an ordered int32) << 32 | (2^32 - 1 - token). Contract: `reference.py`.
"""

import torch
from torch import Tensor

from glm_runtime.score_order import NAN_RANK, score_ranks


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Contract: `reference.select_topk`."""
    num_rows, context = scores.shape
    tokens = torch.arange(context)
    ranks = score_ranks(scores)
    ranks.masked_fill_(tokens >= visible[:, None], NAN_RANK - 1)
    keys = ranks.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - tokens)
    width = min(k, context)
    chosen = torch.topk(keys, width, dim=1, sorted=False).indices
    # Tokens of rows that see fewer than k sort to the end, where they become -1.
    chosen = torch.where(chosen < visible[:, None], chosen, context).sort(dim=1).values
    lists = torch.full((num_rows, k), -1, dtype=torch.int64)
    lists[:, :width] = torch.where(chosen == context, -1, chosen)
    return lists
