"""Whole-tensor form. Contract: `reference.py`."""

from torch import Tensor


def top_probability(logits: Tensor, largest: Tensor) -> Tensor:
    """Contract: `reference.top_probability`."""
    return (largest - logits.float().logsumexp(-1)).exp()
