"""The order of index scores: larger first, -0.0 equal to +0.0, NaN of either sign after everything else. Equal ones go by smaller token."""

import math

import torch
from torch import Tensor

NAN_RANK = -(2**31) + 1
"""Below the rank of -inf. One more rank lies below it."""


def sort_key(score: float) -> tuple[bool, float]:
    """What scores are sorted by, ascending: the better ones first."""
    return (True, 0.0) if math.isnan(score) else (False, -score)


def score_ranks(scores: Tensor) -> Tensor:
    """int32 in the same order, the better the larger, for fp32 scores of any shape; new. Equal scores have equal ranks."""
    # Adding +0.0 turns -0.0 into +0.0. Flipping the low 31 bits of negative floats makes integer order equal float order.
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(scores.isnan(), NAN_RANK)
