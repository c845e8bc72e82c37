"""Whole-tensor form. Contract: `reference.py`, bit for bit."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.ops.quant_fp8.reference import AMAX_FLOOR, ScaleRule
from glm_runtime.small_floats import E4M3_MAX, power_of_two, scale_exponents, to_e4m3

_FLOOR_EXPONENT = -42
"""Of the least power of two that is not below 1e-10 / 448."""


def quant_fp8(x: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Contract: `reference.quant_fp8`."""
    num_rows, num_columns = x.shape
    padded = functional.pad(x.float(), (0, -num_columns % FP8_BLOCK))
    groups = padded.view(num_rows, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    if rule == "ue8m0":
        scales = power_of_two(scale_exponents(groups, E4M3_MAX, _FLOOR_EXPONENT))
    else:
        amax = groups.abs().amax(-1)
        scales = torch.where(amax.isfinite(), amax.clamp_min(AMAX_FLOOR) / E4M3_MAX, math.inf)
    codes = to_e4m3((groups / scales[..., None]).flatten(1)[:, :num_columns])
    return codes.contiguous().view(torch.float8_e4m3fn), scales
