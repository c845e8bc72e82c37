"""The cache formats in whole tensors. Contract: `reference.py`, bit for bit.

Powers of two are made by arithmetic on exponent bits; bytes become numbers by table, two at a time (measured: 8 times faster than
torch's conversion from float8_e4m3fn).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.row_format import FP8_TILE, MXFP4_TILE, NVFP4_TILE, PACKED_LATENT, RowFormat, RowKind

PLAIN_DTYPES = {RowKind.BF16: torch.bfloat16, RowKind.FP32: torch.float32}

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_MIN_NVFP4_SCALE = 2.0**-9
_BIAS = 127
_MANTISSA_BITS = 23
_NOT_FINITE = 255

_E2M1_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _pair_table(numbers: Tensor) -> Tensor:
    """[N * N] int64: for the code low + N * high the two fp32 numbers, low first, as one element."""
    low, high = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
    return torch.stack((low, high), dim=1).view(torch.int64).squeeze(1)


_E2M1_PAIRS = _pair_table(_E2M1_NUMBERS)
_E4M3_PAIRS = _pair_table(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


def encode_rows(values: Tensor, row_format: RowFormat) -> tuple[Tensor, ...]:
    """Contract: `reference.encode_rows`."""
    kind = row_format.kind
    if kind in PLAIN_DTYPES:
        return (values.to(PLAIN_DTYPES[kind]),)
    rows = values.float().contiguous()
    match kind:
        case RowKind.FP8_E4M3:
            return (_to_e4m3(rows),)
        case RowKind.FP8_DS_MLA:
            return (_encode_fp8_ds_mla(rows, row_format),)
        case RowKind.NVFP4_DS_MLA:
            return (_encode_nvfp4_ds_mla(rows, row_format),)
        case RowKind.INDEX_MXFP4:
            tiles = _tiles(rows, MXFP4_TILE)
            exponents = _scale_exponents(tiles, _E2M1_MAX, floor_exponent=-126)
            return _to_e2m1_pairs((tiles / _power(exponents)[..., None]).flatten(1)), exponents.to(torch.uint8)
        case _:
            exponents = _scale_exponents(rows, _E4M3_MAX, floor_exponent=-22)
            scales = _power(exponents)
            packed = _to_e4m3(rows / scales[:, None])
            if kind is RowKind.INDEX_FP8_FP32:
                return packed, scales.view(torch.uint8).view(len(rows), 4)
            return packed, exponents.to(torch.uint8)[:, None].expand(-1, 4)


def decode_rows(stored: Sequence[Tensor], kind: RowKind, out: Tensor) -> Tensor | None:
    """Contract: `reference.decode_rows`."""
    packed, scales = stored[0], stored[-1]
    match kind:
        case RowKind.BF16 | RowKind.FP32:
            out.copy_(packed)
        case RowKind.FP8_E4M3:
            out.copy_(_from_e4m3(packed))
        case RowKind.FP8_DS_MLA:
            _multiply_tiles(_from_e4m3(packed[:, :512]), packed[:, 512:528].view(torch.float32), out[:, :PACKED_LATENT])
            out[:, PACKED_LATENT:] = packed[:, 528:].view(torch.bfloat16)
        case RowKind.NVFP4_DS_MLA:
            # Stored as [j mod 4][j div 4].
            tile_scales = _tiles(_from_e4m3(packed[:, 320:]), 8).transpose(1, 2).flatten(1)
            _multiply_tiles(_from_e2m1_pairs(packed[:, :256]), tile_scales, out[:, :PACKED_LATENT])
            out[:, PACKED_LATENT:] = _from_e4m3(packed[:, 256:320])
        case RowKind.INDEX_MXFP4:
            _multiply_tiles(_from_e2m1_pairs(packed), scales.view(torch.float8_e8m0fnu).float(), out)
        case RowKind.INDEX_FP8_FP32:
            out.copy_(_from_e4m3(packed))
            return scales.contiguous().view(torch.float32).squeeze(1)
        case RowKind.INDEX_FP8_UE8M0:
            out.copy_(_from_e4m3(packed))
            return scales[:, 0].contiguous().view(torch.float8_e8m0fnu).float()
    return None


def _encode_fp8_ds_mla(rows: Tensor, row_format: RowFormat) -> Tensor:
    tiles = _tiles(rows[:, :PACKED_LATENT], FP8_TILE)
    scales = _power(_scale_exponents(tiles, _E4M3_MAX, floor_exponent=-13))
    packed = torch.empty(rows.shape[0], row_format.bytes_per_token, dtype=torch.uint8)
    packed[:, :512] = _to_e4m3((tiles / scales[..., None]).flatten(1))
    packed[:, 512:528] = scales.view(torch.uint8)
    packed[:, 528:] = rows[:, PACKED_LATENT:].bfloat16().view(torch.uint8)
    return packed


def _encode_nvfp4_ds_mla(rows: Tensor, row_format: RowFormat) -> Tensor:
    tiles = _tiles(rows[:, :PACKED_LATENT], NVFP4_TILE)
    amax = tiles.abs().amax(-1)
    wanted = torch.where(amax.isfinite(), (amax / _E2M1_MAX).clamp_min(_MIN_NVFP4_SCALE), math.nan)
    scale_codes = _to_e4m3(wanted)
    packed = torch.empty(rows.shape[0], row_format.bytes_per_token, dtype=torch.uint8)
    packed[:, :256] = _to_e2m1_pairs((tiles / _from_e4m3(scale_codes)[..., None]).flatten(1))
    packed[:, 256:320] = _to_e4m3(rows[:, PACKED_LATENT:])
    packed[:, 320:] = _tiles(scale_codes, 4).transpose(1, 2).flatten(1)  # tile j goes to 8 * (j mod 4) + j div 4
    return packed


def _scale_exponents(tiles: Tensor, largest: float, floor_exponent: int) -> Tensor:
    """Biased exponents [...] int32 of the least power of two, from the floor on, that brings each tile [..., W] within `largest`.

    Adding to amax's bits what the mantissa of `largest` lacks to a full one carries into the exponent exactly when amax's mantissa is
    larger: no division, no logarithm, nothing that a machine could round differently.
    """
    amax = tiles.abs().amax(-1)
    mantissa, exponent = math.frexp(largest)  # 1/2 <= mantissa < 1
    fraction = int((2.0 * mantissa - 1.0) * (1 << _MANTISSA_BITS))
    carried = amax.view(torch.int32) + ((1 << _MANTISSA_BITS) - 1 - fraction)
    biased = (carried >> _MANTISSA_BITS) - (exponent - 1)
    return biased.clamp_min_(_BIAS + floor_exponent).masked_fill_(~amax.isfinite(), _NOT_FINITE)


def _power(biased_exponents: Tensor) -> Tensor:
    """2^(e - 127) as fp32; infinity for 255."""
    return (biased_exponents << _MANTISSA_BITS).view(torch.float32)


def _to_e4m3(numbers: Tensor) -> Tensor:
    """Codes as bytes. Clamped first: the plain cast of older torch makes NaN of what is too large; and NaN has one code."""
    limited = torch.where(numbers.isnan(), math.nan, numbers.clamp(-_E4M3_MAX, _E4M3_MAX))
    return limited.to(torch.float8_e4m3fn).view(torch.uint8)


def _to_e2m1_pairs(numbers: Tensor) -> Tensor:
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


def _from_e4m3(codes: Tensor) -> Tensor:
    """[T, D] fp32 from [T, D] bytes, D even."""
    pairs = codes.contiguous().view(torch.uint16).to(torch.int32).view(-1)
    return _E4M3_PAIRS.index_select(0, pairs).view(torch.float32).view(codes.shape)


def _from_e2m1_pairs(packed: Tensor) -> Tensor:
    """[T, 2 W] fp32 from [T, W] bytes."""
    pairs = packed.to(torch.int32).reshape(-1)
    return _E2M1_PAIRS.index_select(0, pairs).view(torch.float32).view(packed.shape[0], 2 * packed.shape[1])


def _multiply_tiles(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """out [T, D] = numbers [T, D] times one scale [T, D / W] per tile of W."""
    width = numbers.shape[1] // scales.shape[1]
    torch.mul(_tiles(numbers, width), scales[..., None], out=_tiles(out, width))


def _tiles(rows: Tensor, width: int) -> Tensor:
    """[T, D / width, width] view of [T, D]."""
    return rows.view(rows.shape[0], rows.shape[1] // width, width)
