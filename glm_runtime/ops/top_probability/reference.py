"""The specification of the best token's probability. Legend: `M` rows, `V` tokens."""

import math

import torch
from torch import Tensor


def top_probability(logits: Tensor, largest: Tensor) -> Tensor:
    """p = 1 / sum_v exp(logits_v - largest): softmax at its largest, without the other probabilities.

    logits: [M, V] fp32 or bf16. largest: [M] fp32, the largest of each row. Returns [M] fp32, new.
    Rounds: the sum, here fp64, once. The serving forms sum in fp32.
    """
    rows = zip(logits.float().tolist(), largest.tolist(), strict=True)
    return torch.tensor([1.0 / math.fsum([math.exp(logit - best) for logit in row]) for row, best in rows], dtype=torch.float32)
