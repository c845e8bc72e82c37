"""The specification of block-FP8 products. Legend: `M` rows, `N` outputs, `K` inputs, `G` = ceil(K / 128) groups of inputs.

Blocks of 128 x 128 weights share a scale; the last row-block and the last group may be narrower (576 rows: 4.5 blocks).
"""

import torch
from torch import Tensor

from glm_runtime.config_fields import FP8_BLOCK


def block_fp8_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """y[m, n] = sum over g of x_scales[m, g] * weight_scales[n div 128, g] * (sum over k in g of x[m, k] * weight[n, k]).

    x: [M, K] e4m3; x_scales: [M, G] fp32 (`quant_fp8`). weight: [N, K] e4m3; weight_scales: [ceil(N / 128), G] fp32, multiplied although
    the checkpoint calls them scale_inv. Source: FACTS 2. Returns [M, N] of `dtype`, new.
    Rounds: products of codes are exact; a group's sum to fp32 (kernels add in fp32 in any order); the product of the two scales, its
    product with the group's sum, and the sum over ascending groups, each to fp32; y once, to `dtype`.
    """
    total = torch.zeros(x.shape[0], weight.shape[0])
    row_blocks = torch.arange(weight.shape[0]) // FP8_BLOCK
    for group in range(x_scales.shape[1]):
        columns = slice(group * FP8_BLOCK, (group + 1) * FP8_BLOCK)
        partial = (x[:, columns].double() @ weight[:, columns].double().T).float()
        total += partial * (x_scales[:, group, None] * weight_scales[row_blocks, group])
    return total.to(dtype)
