"""The compiled form: one pass over the logits, sums in lanes of 16. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows


def top_probability(logits: Tensor, largest: Tensor) -> Tensor:
    """Contract: `reference.top_probability`. Raises ValueError for dtypes other than fp32 and bf16."""
    num_rows, width = logits.shape
    largest = largest.contiguous()
    probabilities = torch.empty(num_rows)
    library().glm_top_probability(
        logits.data_ptr(), logits.stride(0), is_bf16_rows("top_probability", "logits", logits),
        largest.data_ptr(), probabilities.data_ptr(), num_rows, width,
    )  # fmt: skip
    return probabilities
