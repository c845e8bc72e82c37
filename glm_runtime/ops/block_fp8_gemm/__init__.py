"""Products of rounded activations with block-FP8 weights, for one matrix and for rows grouped by expert.

Not on the CPU's serving path: there weights are dequantised when they load. It says what a kernel for FP8 tensor cores has to do.
"""

from itertools import pairwise

import torch
from torch import Tensor

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.ops.block_fp8_gemm import cpu, reference
from glm_runtime.ops.impl import Impl, check_shape, choose_impl

__all__ = ["block_fp8_gemm", "grouped_block_fp8_gemm"]


def block_fp8_gemm(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype = torch.bfloat16, *, impl: Impl | None = None
) -> Tensor:
    """y = x W^T of block-FP8 operands. See `reference.py`. Raises ValueError for shapes and dtypes that do not fit together."""
    _check("block_fp8_gemm", x, x_scales, weight, weight_scales)
    if choose_impl(impl, x) == "reference":
        return reference.block_fp8_gemm(x, x_scales, weight, weight_scales, dtype)
    return cpu.block_fp8_gemm(x, x_scales, weight, weight_scales, dtype)


def grouped_block_fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    impl: Impl | None = None,
) -> Tensor:
    """`block_fp8_gemm` of each run of rows with its own matrix.

    weights: [E, N, K]; weight_scales: [E, ceil(N / 128), G]; ends: [E] int64, ascending — rows [ends[e - 1], ends[e]) take matrix e.
    Returns [M, N] of `dtype`, new. Raises ValueError for shapes and dtypes that do not fit, and for ends that are not those of the rows.
    """
    check_shape("grouped_block_fp8_gemm", "weight_scales", weight_scales, (weights.shape[0], -1, -1))
    check_shape("grouped_block_fp8_gemm", "ends", ends, (weights.shape[0],))
    bounds = [0, *ends.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != x.shape[0]:
        raise ValueError(f"grouped_block_fp8_gemm: ends are {bounds[1:]}; expected ascending numbers up to {x.shape[0]} rows")
    out = torch.empty(x.shape[0], weights.shape[1], dtype=dtype)
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            rows = slice(start, end)
            out[rows] = block_fp8_gemm(x[rows], x_scales[rows], weights[expert], weight_scales[expert], dtype, impl=impl)
    return out


def _check(op: str, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> None:
    num_columns, num_groups = x.shape[1], -(-x.shape[1] // FP8_BLOCK)
    check_shape(op, "x_scales", x_scales, (x.shape[0], num_groups))
    check_shape(op, "weight", weight, (-1, num_columns))
    check_shape(op, "weight_scales", weight_scales, (-(-weight.shape[0] // FP8_BLOCK), num_groups))
    for argument, tensor, wanted in (
        ("x", x, torch.float8_e4m3fn),
        ("weight", weight, torch.float8_e4m3fn),
        ("x_scales", x_scales, torch.float32),
        ("weight_scales", weight_scales, torch.float32),
    ):
        if tensor.dtype is not wanted:
            raise ValueError(f"{op}: {argument} is {tensor.dtype}; expected {wanted}")
