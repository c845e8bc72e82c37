"""The compiled form. Contract: `reference.py`; the sum of squares runs in lanes of 16 numbers."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows

_ABSENT = (None, 0, False)
"""Pointer, stride and dtype of a summand that is not there."""


def add_rms_norm(residual: Tensor, owed: tuple[Tensor, ...], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract: `reference.add_rms_norm`. Raises ValueError for dtypes other than fp32 and bf16."""
    num_rows, width = residual.shape
    normed = torch.empty(num_rows, width, dtype=residual.dtype)
    total = torch.empty_like(normed) if owed else residual
    summands: list[int] = []
    for summand in owed:
        summands += [summand.data_ptr(), summand.stride(0), is_bf16_rows("add_rms_norm", "owed", summand)]
    library().glm_add_rms_norm(
        residual.data_ptr(), residual.stride(0), *summands, *_ABSENT * (2 - len(owed)),
        weight.data_ptr(), is_bf16_rows("add_rms_norm", "weight", weight), total.data_ptr(), normed.data_ptr(),
        is_bf16_rows("add_rms_norm", "residual", residual), num_rows, width, eps,
    )  # fmt: skip
    return total, normed
