"""Which implementation of an op runs. The model names the one that was chosen at load (`Numerics.impl`); tests name all of them."""

from typing import Literal

import torch
from torch import Tensor

from glm_runtime.paged_cache import CacheRegion

Impl = Literal["reference", "cpu", "native"]
"""cpu: whole-tensor torch operations. native: the compiled kernels of `glm_runtime/native`."""


def choose_impl(impl: Impl | None, tensor: Tensor) -> Impl:
    """The explicit choice, else what serves on the tensor's device."""
    return impl or ("cpu" if tensor.device.type == "cpu" else "reference")


def check_shape(op: str, argument: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError naming op, argument, expected and actual shape; -1 in `expected` stands for any size."""
    actual = tensor.shape
    if actual == expected:
        return
    if len(actual) == len(expected):
        for want, have in zip(expected, actual, strict=True):
            if want not in (-1, have):
                break
        else:
            return
    raise ValueError(f"{op}: {argument} has shape {list(actual)}; expected {list(expected)} (-1 is any)")


def check_width(op: str, argument: str, region: CacheRegion, expected: int) -> None:
    """Raises ValueError naming op, argument, expected and actual numbers of a row of the region."""
    if region.row_format.width != expected:
        raise ValueError(f"{op}: {argument} has rows of {region.row_format.width} numbers; expected {expected}")


def is_bf16_rows(op: str, argument: str, tensor: Tensor) -> bool:
    """Whether a compiled kernel is to read bf16, else fp32. Raises ValueError for another dtype and for rows that are not contiguous."""
    dtype = tensor.dtype
    if (dtype is torch.float32 or dtype is torch.bfloat16) and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1):
        return dtype is torch.bfloat16
    raise ValueError(f"{op}: {argument} is {dtype} with strides {tensor.stride()}; expected fp32 or bf16, contiguous rows")
