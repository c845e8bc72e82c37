"""The compiled form. Contract: `reference.py`; the sum of squares runs in lanes of 16 numbers."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows

_ABSENT = (None, 0, False)
"""Pointer, stride and dtype of a summand that is not there."""


def add_rms_norm(residual: Tensor, owed: tuple[Tensor, ...], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract: `reference.add_rms_norm`. Raises ValueError for dtypes other than fp32 and bf16."""
    is_bf16 = is_bf16_rows("add_rms_norm", "residual", residual)
    num_rows, width = residual.shape
    normed = torch.empty(num_rows, width, dtype=residual.dtype)
    total = torch.empty(num_rows, width, dtype=residual.dtype) if owed else residual
    first = _summand(owed[0]) if owed else _ABSENT
    second = _summand(owed[1]) if len(owed) > 1 else _ABSENT
    library().glm_add_rms_norm(
        residual.data_ptr(), residual.stride(0), *first, *second, weight.data_ptr(), is_bf16_rows("add_rms_norm", "weight", weight),
        total.data_ptr(), normed.data_ptr(), is_bf16, num_rows, width, eps,
    )  # fmt: skip
    return total, normed


def _summand(owed: Tensor) -> tuple[int, int, bool]:
    return owed.data_ptr(), owed.stride(0), is_bf16_rows("add_rms_norm", "owed", owed)
