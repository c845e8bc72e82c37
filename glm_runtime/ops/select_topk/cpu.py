"""Top-k over 64-bit keys that are all different, so that any selection algorithm gives the one right answer.

key = (score as an ordered int32) << 32 | (2^32 - 1 - token). Contract: `reference.py`.
"""

import torch
from torch import Tensor

_NAN_RANK = -(2**31) + 1
"""Below the rank of -inf; a masked token ranks one lower still, at -2^31."""


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Contract: `reference.select_topk`."""
    num_rows, context = scores.shape
    tokens = torch.arange(context)
    ranks = ordered_ranks(scores)
    ranks.masked_fill_(tokens >= visible[:, None], _NAN_RANK - 1)
    keys = ranks.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - tokens)
    width = min(k, context)
    chosen = torch.topk(keys, width, dim=1, sorted=False).indices
    # Tokens of rows that see fewer than k sort to the end, where they become -1.
    chosen = torch.where(chosen < visible[:, None], chosen, context).sort(dim=1).values
    lists = torch.full((num_rows, k), -1, dtype=torch.int64)
    lists[:, :width] = torch.where(chosen == context, -1, chosen)
    return lists


def ordered_ranks(scores: Tensor) -> Tensor:
    """int32 in the order of the contract for fp32 scores, any shape, new: equal scores have equal ranks, NaN the smallest."""
    # Adding +0.0 turns -0.0 into +0.0. Flipping the low 31 bits of negative floats makes integer order equal float order.
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(scores.isnan(), _NAN_RANK)
