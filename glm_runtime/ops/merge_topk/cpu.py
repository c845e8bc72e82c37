"""The merge over 64-bit keys that are all different. Contract: `reference.py`.

key = (score as an ordered int32) << 32 | (2^32 - 1 - token), as in `select_topk`; an entry without a token has the smallest.
"""

import torch
from torch import Tensor

from glm_runtime.score_order import score_ranks

_NO_TOKEN = -(2**63)
_NO_POSITION = 2**62


def merge_topk(scores: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Contract: `reference.merge_topk`."""
    num_rows = scores.shape[1]
    ranks = score_ranks(scores.transpose(0, 1).flatten(1))
    entries = tokens.transpose(0, 1).flatten(1)  # [T, W * K]
    keys = ranks.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - entries)
    keys.masked_fill_(entries < 0, _NO_TOKEN)
    width = min(k, entries.shape[1])
    chosen = entries.gather(1, torch.topk(keys, width, dim=1, sorted=False).indices)
    ascending = torch.where(chosen < 0, _NO_POSITION, chosen).sort(dim=1).values
    lists = torch.full((num_rows, k), -1, dtype=torch.int64)
    lists[:, :width] = torch.where(ascending == _NO_POSITION, -1, ascending)
    return lists
