"""The specification of the cache formats, number by number. Source: FACTS 4.1 and 4.2.

Legend: `T` rows, `D` numbers of a row. A format's planes are [T, W] each: bytes, or numbers for bf16 and fp32.
Rounding is to nearest, ties to the even code, saturating at the largest number; the sign of zero is kept; NaN stays NaN. Scales that
are powers of two come from comparing with powers of two, never from a logarithm, whose last bit differs between machines.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.row_format import FP8_TILE, MXFP4_TILE, NVFP4_TILE, PACKED_LATENT, RowFormat, RowKind
from glm_runtime.small_floats import E2M1_NUMBERS, E4M3_NUMBERS


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A number format by its table: numbers of the codes 0, 1, ... in ascending order; `negative` is the code of -0; `nan` of NaN."""

    numbers: tuple[float, ...]
    negative: int
    nan: int

    def encode(self, value: float) -> int:
        """The code of the nearest number, of two equally near ones the even."""
        if math.isnan(value):
            return self.nan
        magnitude, sign = abs(value), self.negative if math.copysign(1.0, value) < 0 else 0
        above = bisect_left(self.numbers, magnitude)
        if above == len(self.numbers):
            return sign + above - 1
        if above > 0:
            to_below, to_above = magnitude - self.numbers[above - 1], self.numbers[above] - magnitude
            if to_below < to_above or (to_below == to_above and above % 2 == 1):
                above -= 1
        return sign + above

    def decode(self, code: int) -> float:
        """The number of a code."""
        magnitude = code % self.negative
        number = self.numbers[magnitude] if magnitude < len(self.numbers) else math.nan
        return -number if code >= self.negative else number


E4M3 = SmallFloat(numbers=E4M3_NUMBERS, negative=128, nan=127)
E2M1 = SmallFloat(numbers=E2M1_NUMBERS, negative=8, nan=0)
"""e2m1 has no NaN: the tile's scale carries it."""
UE8M0_NAN = 255


def encode_rows(values: Tensor, row_format: RowFormat) -> tuple[Tensor, ...]:
    """Round rows [T, D] of any float dtype. Returns one [T, W] per plane, new.

    Rounds: each number once, after its division by the *rounded* scale (in fp32: exact for powers of two). A tile with a number that
    is not finite gets a scale that is not, so that all of it reads as NaN.
    """
    if row_format.kind is RowKind.BF16:
        return (values.bfloat16(),)
    if row_format.kind is RowKind.FP32:
        return (values.float(),)
    encoded = [_encode_row(row, row_format.kind) for row in values.float().contiguous()]
    return tuple(
        torch.tensor([planes[number] for planes in encoded], dtype=torch.uint8).reshape(len(encoded), size)
        for number, size in enumerate(row_format.plane_bytes)
    )


def decode_rows(stored: Sequence[Tensor], kind: RowKind, out: Tensor) -> Tensor | None:
    """Write the numbers of T stored rows to `out` [T, D] fp32. Returns None, or [T] fp32 factors that the reader has to apply.

    FP8 index keys leave their factor to the reader, because it belongs behind the sum: logit = s_k * sum over heads. All other formats
    are written as numbers. Nothing is assumed about the fp32 scales of fp8_ds_mla: others write such that are no powers of two.
    Rounds: each product with a scale, to fp32 (exact, but for scales of others and for subnormal results).
    """
    factors = torch.empty(out.shape[0])
    for row in range(out.shape[0]):
        if kind in (RowKind.BF16, RowKind.FP32):
            out[row] = stored[0][row].float()
        else:
            numbers, factors[row] = _decode_row([plane[row].tolist() for plane in stored], kind)
            out[row] = numbers
    return factors if kind in (RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0) else None


def _encode_row(row: Tensor, kind: RowKind) -> list[list[int]]:
    """The bytes of one row, by plane."""
    latent, rope = row[:PACKED_LATENT], row[PACKED_LATENT:]
    match kind:
        case RowKind.FP8_E4M3:  # as it is: the one scale of the tensor is 1.0
            return [_e4m3(row)]
        case RowKind.FP8_DS_MLA:  # [0, 512) e4m3, [512, 528) scales, [528, 656) bf16; the floor is on the scale: 1e-4 is below 2^-13
            scales = [_power_of_two(tile, E4M3, floor_exponent=-13) for tile in latent.view(-1, FP8_TILE)]
            packed = [code for tile, scale in zip(latent.view(-1, FP8_TILE), scales, strict=True) for code in _e4m3(tile / scale)]
            return [packed + _bytes_of(torch.tensor(scales)) + _bytes_of(rope.bfloat16())]
        case RowKind.NVFP4_DS_MLA:  # [0, 256) e2m1, [256, 320) e4m3, [320, 352) scales in another order than their tiles
            tiles = latent.view(-1, NVFP4_TILE)
            scale_codes = [_nvfp4_scale(tile) for tile in tiles]
            packed = [byte for tile, code in zip(tiles, scale_codes, strict=True) for byte in _e2m1_pairs(tile / E4M3.decode(code))]
            shuffled = [0] * len(tiles)
            for j, code in enumerate(scale_codes):
                shuffled[8 * (j % 4) + j // 4] = code
            return [packed + _e4m3(rope) + shuffled]
        case RowKind.INDEX_MXFP4:
            scales = [_power_of_two(tile, E2M1, floor_exponent=-126) for tile in row.view(-1, MXFP4_TILE)]
            packed = [byte for tile, scale in zip(row.view(-1, MXFP4_TILE), scales, strict=True) for byte in _e2m1_pairs(tile / scale)]
            return [packed, [_ue8m0(scale) for scale in scales]]
        case RowKind.INDEX_FP8_FP32 | RowKind.INDEX_FP8_UE8M0:  # the floor is on amax: 1e-4 / 448 is below 2^-22
            scale = _power_of_two(row, E4M3, floor_exponent=-22)
            is_fp32 = kind is RowKind.INDEX_FP8_FP32
            return [_e4m3(row / scale), _bytes_of(torch.tensor([scale])) if is_fp32 else [_ue8m0(scale)] * 4]
        case _:
            raise AssertionError(f"{kind} has no packed rows")


def _decode_row(planes: list[list[int]], kind: RowKind) -> tuple[Tensor, float]:
    """The numbers of one row, and the factor that is left to the reader."""
    packed, scale_plane = planes[0], planes[-1]
    match kind:
        case RowKind.FP8_E4M3:
            return _numbers(E4M3, packed), 1.0
        case RowKind.FP8_DS_MLA:
            scales = _floats_of(packed[512:528]).repeat_interleave(FP8_TILE)
            rope = torch.tensor(packed[528:], dtype=torch.uint8).view(torch.bfloat16).float()
            return torch.cat((_numbers(E4M3, packed[:512]) * scales, rope)), 1.0
        case RowKind.NVFP4_DS_MLA:
            scales = _numbers(E4M3, [packed[320 + 8 * (j % 4) + j // 4] for j in range(32)]).repeat_interleave(NVFP4_TILE)
            return torch.cat((_e2m1_numbers(packed[:256]) * scales, _numbers(E4M3, packed[256:320]))), 1.0
        case RowKind.INDEX_MXFP4:
            scales = torch.tensor([_ue8m0_number(code) for code in scale_plane]).repeat_interleave(MXFP4_TILE)
            return _e2m1_numbers(packed) * scales, 1.0
        case RowKind.INDEX_FP8_FP32:
            return _numbers(E4M3, packed), float(_floats_of(scale_plane))
        case RowKind.INDEX_FP8_UE8M0:
            return _numbers(E4M3, packed), _ue8m0_number(scale_plane[0])
        case _:
            raise AssertionError(f"{kind} has no packed rows")


def _power_of_two(tile: Tensor, target: SmallFloat, floor_exponent: int) -> float:
    """The least power of two 2^e, e >= floor_exponent, with amax / 2^e within `target`; infinity when a number is not finite."""
    if not tile.isfinite().all():
        return math.inf
    amax, exponent = float(tile.abs().max()), floor_exponent
    while amax > math.ldexp(target.numbers[-1], exponent):
        exponent += 1
    return math.ldexp(1.0, exponent)


def _nvfp4_scale(tile: Tensor) -> int:
    """e4m3(max(amax / 6, 2^-9)); saturates, but for numbers that are not finite."""
    if not tile.isfinite().all():
        return E4M3.nan
    return E4M3.encode(max(float(tile.abs().max() / 6.0), 2.0**-9))


def _e4m3(numbers: Tensor) -> list[int]:
    return [E4M3.encode(value) for value in numbers.tolist()]


def _numbers(small: SmallFloat, codes: Sequence[int]) -> Tensor:
    return torch.tensor([small.decode(code) for code in codes])


def _e2m1_pairs(numbers: Tensor) -> list[int]:
    """Codes two to a byte, the even index in the low nibble."""
    codes = [E2M1.encode(value) for value in numbers.tolist()]
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]


def _e2m1_numbers(packed: Sequence[int]) -> Tensor:
    return _numbers(E2M1, [code for byte in packed for code in (byte & 15, byte >> 4)])


def _ue8m0(scale: float) -> int:
    """The biased exponent."""
    return UE8M0_NAN if math.isinf(scale) else math.frexp(scale)[1] + 126


def _ue8m0_number(code: int) -> float:
    return math.nan if code == UE8M0_NAN else math.ldexp(1.0, code - 127)


def _bytes_of(numbers: Tensor) -> list[int]:
    """Little-endian bytes."""
    return numbers.contiguous().view(torch.uint8).tolist()


def _floats_of(codes: Sequence[int]) -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float32)
