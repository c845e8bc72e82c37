"""One fp32 product over operands with their scales multiplied in. Contract: `reference.py`, up to the order of sums.

Scales are not applied group by group: a scaled code is rounded once to fp32, which is as far from the reference as another order of
sums is.
"""

import torch
from torch import Tensor

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.quantisation import dequantise_block_fp8


def block_fp8_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Contract: `reference.block_fp8_gemm`."""
    scaled = x.float() * x_scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : x.shape[1]]
    return (scaled @ dequantise_block_fp8(weight, weight_scales).T).to(dtype)
