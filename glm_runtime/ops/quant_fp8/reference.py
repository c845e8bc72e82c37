"""The specification of activation rounding.

Legend: `T` rows, `K` columns, `G` = ceil(K / 128) groups of columns; the last may be narrower.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.small_floats import E4M3_MAX, to_e4m3

ScaleRule = Literal["fp32", "ue8m0"]
"""fp32: s = max(amax, 1e-10) / 448, as the checkpoint's own scales. ue8m0: the least power of two that is not smaller, which is what
FP8 tensor cores of SM100 take. Source: FACTS 2; the floor is the one of vLLM's per-token-group kernels."""

AMAX_FLOOR = 1e-10


def quant_fp8(x: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """q = sat_e4m3(x / s), s of each row's 128 columns.

    x: [T, K] any float dtype. Returns q [T, K] float8_e4m3fn and s [T, G] fp32, both new.
    Rounds: s (rule fp32) to fp32; the quotient to fp32 (exact for ue8m0), then to e4m3: nearest, ties to even, saturating. A group with
    a number that is not finite gets a scale that is not, so that all of it reads as NaN.
    """
    num_rows, num_columns = x.shape
    wide = x.float()
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    scales = torch.empty(num_rows, -(-num_columns // FP8_BLOCK))
    for row in range(num_rows):
        for group in range(scales.shape[1]):
            columns = slice(group * FP8_BLOCK, (group + 1) * FP8_BLOCK)
            scales[row, group] = _scale(wide[row, columns], rule)
            codes[row, columns] = to_e4m3(wide[row, columns] / scales[row, group])
    return codes.view(torch.float8_e4m3fn), scales


def _scale(numbers: Tensor, rule: ScaleRule) -> Tensor:
    if not numbers.isfinite().all():
        return torch.tensor(math.inf)
    amax = numbers.abs().max().clamp_min(AMAX_FLOOR)
    if rule == "fp32":
        return amax / E4M3_MAX
    exponent = math.ceil(math.log2(float(amax) / E4M3_MAX)) - 1  # one too small, lest the logarithm rounded up
    while float(amax) > math.ldexp(E4M3_MAX, exponent):
        exponent += 1
    return torch.tensor(math.ldexp(1.0, exponent))
