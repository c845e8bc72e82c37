"""Activations rounded to e4m3, one scale per row and 128 columns: what block-FP8 tensor cores multiply.

Not on the CPU's serving path: there weights are dequantised when they load, and rows are multiplied as they are. It says what a kernel
for FP8 tensor cores has to do.
"""

from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.quant_fp8 import cpu, reference
from glm_runtime.ops.quant_fp8.reference import ScaleRule

__all__ = ["ScaleRule", "quant_fp8"]


def quant_fp8(x: Tensor, rule: ScaleRule = "fp32", *, impl: Impl | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to e4m3 with their scales. See `reference.py`. Raises ValueError for what is no matrix and for an unknown rule."""
    check_shape("quant_fp8", "x", x, (-1, -1))
    if rule not in ("fp32", "ue8m0"):
        raise ValueError(f"quant_fp8: rule is {rule!r}; expected 'fp32' or 'ue8m0'")
    if choose_impl(impl, x) == "reference":
        return reference.quant_fp8(x, rule)
    return cpu.quant_fp8(x, rule)
