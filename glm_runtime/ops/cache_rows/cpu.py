"""The cache formats in whole tensors. Contract: `reference.py`, bit for bit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.row_format import FP8_TILE, MXFP4_TILE, NVFP4_TILE, PACKED_LATENT, RowFormat, RowKind
from glm_runtime.small_floats import (
    E2M1_MAX,
    E4M3_MAX,
    from_e2m1_pairs,
    from_e4m3,
    power_of_two,
    scale_exponents,
    to_e2m1_pairs,
    to_e4m3,
)

PLAIN_DTYPES = {RowKind.BF16: torch.bfloat16, RowKind.FP32: torch.float32}

_MIN_NVFP4_SCALE = 2.0**-9


def encode_rows(values: Tensor, row_format: RowFormat) -> tuple[Tensor, ...]:
    """Contract: `reference.encode_rows`."""
    kind = row_format.kind
    if kind in PLAIN_DTYPES:
        return (values.to(PLAIN_DTYPES[kind]),)
    rows = values.float().contiguous()
    match kind:
        case RowKind.FP8_E4M3:
            return (to_e4m3(rows),)
        case RowKind.FP8_DS_MLA:
            return (_encode_fp8_ds_mla(rows, row_format),)
        case RowKind.NVFP4_DS_MLA:
            return (_encode_nvfp4_ds_mla(rows, row_format),)
        case RowKind.INDEX_MXFP4:
            tiles = _tiles(rows, MXFP4_TILE)
            exponents = scale_exponents(tiles, E2M1_MAX, floor_exponent=-126)
            return to_e2m1_pairs((tiles / power_of_two(exponents)[..., None]).flatten(1)), exponents.to(torch.uint8)
        case _:
            exponents = scale_exponents(rows, E4M3_MAX, floor_exponent=-22)
            scales = power_of_two(exponents)
            packed = to_e4m3(rows / scales[:, None])
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
            out.copy_(from_e4m3(packed))
        case RowKind.FP8_DS_MLA:
            _multiply_tiles(from_e4m3(packed[:, :512]), packed[:, 512:528].view(torch.float32), out[:, :PACKED_LATENT])
            out[:, PACKED_LATENT:] = packed[:, 528:].view(torch.bfloat16)
        case RowKind.NVFP4_DS_MLA:
            # Stored as [j mod 4][j div 4].
            tile_scales = _tiles(from_e4m3(packed[:, 320:]), 8).transpose(1, 2).flatten(1)
            _multiply_tiles(from_e2m1_pairs(packed[:, :256]), tile_scales, out[:, :PACKED_LATENT])
            out[:, PACKED_LATENT:] = from_e4m3(packed[:, 256:320])
        case RowKind.INDEX_MXFP4:
            _multiply_tiles(from_e2m1_pairs(packed), scales.view(torch.float8_e8m0fnu).float(), out)
        case RowKind.INDEX_FP8_FP32:
            out.copy_(from_e4m3(packed))
            return scales.contiguous().view(torch.float32).squeeze(1)
        case RowKind.INDEX_FP8_UE8M0:
            out.copy_(from_e4m3(packed))
            return scales[:, 0].contiguous().view(torch.float8_e8m0fnu).float()
    return None


def _encode_fp8_ds_mla(rows: Tensor, row_format: RowFormat) -> Tensor:
    tiles = _tiles(rows[:, :PACKED_LATENT], FP8_TILE)
    scales = power_of_two(scale_exponents(tiles, E4M3_MAX, floor_exponent=-13))
    packed = torch.empty(rows.shape[0], row_format.bytes_per_token, dtype=torch.uint8)
    packed[:, :512] = to_e4m3((tiles / scales[..., None]).flatten(1))
    packed[:, 512:528] = scales.view(torch.uint8)
    packed[:, 528:] = rows[:, PACKED_LATENT:].bfloat16().view(torch.uint8)
    return packed


def _encode_nvfp4_ds_mla(rows: Tensor, row_format: RowFormat) -> Tensor:
    tiles = _tiles(rows[:, :PACKED_LATENT], NVFP4_TILE)
    amax = tiles.abs().amax(-1)
    wanted = torch.where(amax.isfinite(), (amax / E2M1_MAX).clamp_min(_MIN_NVFP4_SCALE), math.nan)
    scale_codes = to_e4m3(wanted)
    packed = torch.empty(rows.shape[0], row_format.bytes_per_token, dtype=torch.uint8)
    packed[:, :256] = to_e2m1_pairs((tiles / from_e4m3(scale_codes)[..., None]).flatten(1))
    packed[:, 256:320] = to_e4m3(rows[:, PACKED_LATENT:])
    packed[:, 320:] = _tiles(scale_codes, 4).transpose(1, 2).flatten(1)  # tile j goes to 8 * (j mod 4) + j div 4
    return packed


def _multiply_tiles(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """out [T, D] = numbers [T, D] times one scale [T, D / W] per tile of W."""
    width = numbers.shape[1] // scales.shape[1]
    torch.mul(_tiles(numbers, width), scales[..., None], out=_tiles(out, width))


def _tiles(rows: Tensor, width: int) -> Tensor:
    """[T, D / width, width] view of [T, D]."""
    return rows.view(rows.shape[0], rows.shape[1] // width, width)
