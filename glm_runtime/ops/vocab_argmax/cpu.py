"""Whole-tensor form. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.ops.vocab_argmax.reference import Best


def vocab_argmax(logits: Tensor, first_id: int) -> Best:
    """Contract: `reference.vocab_argmax`."""
    places = first_largest(logits)
    values = logits.gather(1, places[:, None]).squeeze(1).float()
    return Best(values, places + first_id, torch.isfinite(logits).all(-1))


def first_largest(numbers: Tensor) -> Tensor:
    """[M] int64, the first column that holds the row's largest number; NaN is the largest.

    torch.argmax promises no order among equals: hence the comparison.
    """
    largest = numbers.amax(-1, keepdim=True)  # NaN if there is one
    is_largest = torch.where(largest.isnan(), numbers.isnan(), numbers == largest)
    return torch.where(is_largest, torch.arange(numbers.shape[1]), numbers.shape[1]).amin(-1)
