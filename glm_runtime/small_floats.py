"""e4m3 and e2m1: their numbers, the rounding of whole tensors into them and back, and powers of two as scales.

Rounding is to nearest, ties to the even code, saturating; zero keeps its sign. The specification that rounds number by number is in
`ops/cache_rows/reference.py`; the compiled form in `native/src/row_encode.hpp`. Knows nothing of tiles, rows or files.
"""

import math

import torch
from torch import Tensor

E4M3_NUMBERS = (*(m * 2.0**-9 for m in range(8)), *((8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)))[:127]
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0, 1, ... without their sign, ascending."""
E4M3_MAX, E2M1_MAX = E4M3_NUMBERS[-1], E2M1_NUMBERS[-1]

NOT_FINITE_EXPONENT = 255
_BIAS = 127
_MANTISSA_BITS = 23


def _pair_table(numbers: Tensor) -> Tensor:
    """[N * N] int64: for the code low + N * high the two fp32 numbers, low first, as one element."""
    low, high = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
    return torch.stack((low, high), dim=1).view(torch.int64).squeeze(1)


_E2M1_PAIRS = _pair_table(torch.tensor([*E2M1_NUMBERS, *(-number for number in E2M1_NUMBERS)]))
_E4M3_PAIRS = _pair_table(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
"""Bytes become numbers two at a time: measured 8 times faster than torch's conversion from float8_e4m3fn."""


def to_e4m3(numbers: Tensor) -> Tensor:
    """Codes as bytes. Clamped first: the plain cast of older torch makes NaN of what is too large; and NaN has one code."""
    limited = torch.where(numbers.isnan(), math.nan, numbers.clamp(-E4M3_MAX, E4M3_MAX))
    return limited.to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """[T, D] fp32 from [T, D] bytes, D even."""
    pairs = codes.contiguous().view(torch.uint16).to(torch.int32).view(-1)
    return _E4M3_PAIRS.index_select(0, pairs).view(torch.float32).view(codes.shape)


def to_e2m1_pairs(numbers: Tensor) -> Tensor:
    """[T, D / 2] bytes from [T, D] numbers, the even index in the low nibble; NaN becomes +0, its tile's scale carries it.

    A boundary belongs to the neighbour with the even code: hence > and >= by turns.
    """
    magnitudes = numbers.abs()
    codes = (magnitudes > 0.25).to(torch.uint8)
    codes += magnitudes >= 0.75
    codes += magnitudes > 1.25
    codes += magnitudes >= 1.75
    codes += magnitudes > 2.5
    codes += magnitudes >= 3.5
    codes += magnitudes > 5.0
    codes += (numbers.signbit() & ~numbers.isnan()).to(torch.uint8) * 8
    return codes[:, ::2] | codes[:, 1::2] << 4


def from_e2m1_pairs(packed: Tensor) -> Tensor:
    """[T, 2 W] fp32 from [T, W] bytes."""
    pairs = packed.to(torch.int32).reshape(-1)
    return _E2M1_PAIRS.index_select(0, pairs).view(torch.float32).view(packed.shape[0], 2 * packed.shape[1])


def scale_exponents(tiles: Tensor, largest: float, floor_exponent: int) -> Tensor:
    """Biased exponents [...] int32 of the least power of two, from the floor on, that brings each tile [..., W] within `largest`.

    Adding to amax's bits what the mantissa of `largest` lacks to a full one carries into the exponent exactly when amax's mantissa is
    larger: no division, no logarithm, nothing that a machine could round differently. A tile that is not finite gets 255.
    """
    amax = tiles.abs().amax(-1)
    mantissa, exponent = math.frexp(largest)  # 1/2 <= mantissa < 1
    fraction = int((2.0 * mantissa - 1.0) * (1 << _MANTISSA_BITS))
    carried = amax.view(torch.int32) + ((1 << _MANTISSA_BITS) - 1 - fraction)
    biased = (carried >> _MANTISSA_BITS) - (exponent - 1)
    return biased.clamp_min_(_BIAS + floor_exponent).masked_fill_(~amax.isfinite(), NOT_FINITE_EXPONENT)


def power_of_two(biased_exponents: Tensor) -> Tensor:
    """2^(e - 127) as fp32; infinity for 255."""
    return (biased_exponents << _MANTISSA_BITS).view(torch.float32)
