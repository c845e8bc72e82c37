"""Weights as block-FP8 and NVFP4 bytes, and back. What the runtime reads is exact; what `quantise_*` writes is the nearest value.

Knows: what the bytes mean. Does not know names or files (`weight_format.py`, `tensor_reader.py`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.small_floats import E2M1_MAX, E4M3_MAX, from_e2m1_pairs, to_e2m1_pairs
from glm_runtime.weight_format import NVFP4_GROUP


def dequantise_block_fp8(quantised: Tensor, scale: Tensor) -> Tensor:
    """w = q * scale of its 128 x 128 block. quantised: [N, K] e4m3; scale: [ceil(N / 128), ceil(K / 128)] fp32. Returns fp32, new."""
    wide = quantised.float()
    for block, row_scales in zip(torch.split(wide, FP8_BLOCK), scale, strict=True):
        block.mul_(row_scales.repeat_interleave(FP8_BLOCK)[: wide.shape[1]])
    return wide


def quantise_block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [N, K]. Returns e4m3 [N, K] and its scales [ceil(N / 128), ceil(K / 128)] fp32: amax / 448, 1 for a block of zeros."""
    wide = weight.float()
    num_rows, num_columns = wide.shape
    padded = functional.pad(wide, (0, -num_columns % FP8_BLOCK, 0, -num_rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    blocks = (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return blocks.view(padded.shape)[:num_rows, :num_columns].to(torch.float8_e4m3fn).contiguous(), scales


def dequantise_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """w = (value * scale of its 16 columns) * global_scale: the first product is exact in fp32, so w is rounded once.

    packed: [N, K / 2] uint8, the even column in the low nibble; scale: [N, K / 16] e4m3; global_scale: one fp32. Returns fp32, new.
    """
    groups = from_e2m1_pairs(packed).view(packed.shape[0], -1, NVFP4_GROUP)
    return groups.mul_(scale.float()[:, :, None]).mul_(global_scale.reshape(())).view(packed.shape[0], -1)


def quantise_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight: [N, K], K a multiple of 16. Returns packed [N, K / 2] uint8, scale [N, K / 16] e4m3 and the global scale, fp32 scalar.

    The global scale makes the largest group scale 448; values are divided by the rounded scales and go to the nearest e2m1, ties
    to even, at most 6.
    """
    groups = weight.float().view(weight.shape[0], -1, NVFP4_GROUP)
    largest = groups.abs().amax(dim=-1)
    whole = largest.max()
    global_scale = torch.where(whole > 0, whole / (E4M3_MAX * E2M1_MAX), 1.0)
    scale = (largest / (E2M1_MAX * global_scale)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = (scale.float() * global_scale)[:, :, None]
    packed = to_e2m1_pairs(torch.where(divisor > 0, groups / divisor, 0.0).flatten(1))
    return packed, scale, global_scale
