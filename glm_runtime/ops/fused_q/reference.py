"""The specification of the query side.

Legend: `T` rows, `H` heads, `N` nope dim, `R` rope dim, `C` latent rank, `D` index head dim.
"""

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows, encode_rows
from glm_runtime.row_format import RowFormat, RowKind


def fused_q(heads: Tensor, absorbed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[absorbed | rotate(heads[N:])], pairs (2i, 2i + 1). Source: FACTS 3.3 and 3.7.

    heads: [T, H, N + R], q_b's product; absorbed: [T, H, C] = heads[:N] W_k, of heads' dtype; cos, sin: [T, R / 2] fp32.
    Returns [T, H, C + R] of heads' dtype, new. Rounds: the rotation once, to heads' dtype.
    """
    rope = 2 * cos.shape[1]
    rotated = torch.stack([_rotate(row, cos[number], sin[number]) for number, row in enumerate(heads[..., heads.shape[2] - rope :])] or [])
    return torch.cat((absorbed, rotated), dim=-1)


def index_queries(flat: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """[rotate(q[:R]) | q[R:]], then as the keys' format computes with it. The *first* R numbers are rotated. Source: FACTS 3.4, 3.5.

    flat: [T, H, D]; weights: [T, H] fp32; cos, sin: [T, R / 2] fp32; row_format: of the index keys.
    Returns [T, H, D] and weights [T, H] fp32, new: beside FP8 keys e4m3 numbers, whose scale moves into the weight (positive, so it may
    cross the ReLU); beside MXFP4 keys numbers with their scales; beside plain keys the rotated queries and the weights as they are.
    Packed formats give bf16, which holds all of those numbers exactly; plain ones flat's dtype.
    Rounds: the rotation once to flat's dtype, then as `encode_rows` does per (token, head).
    """
    rope = 2 * cos.shape[1]
    rotated = torch.cat(
        (torch.stack([_rotate(row[:, :rope], cos[number], sin[number]) for number, row in enumerate(flat)]), flat[..., rope:]), dim=-1
    )
    if row_format.kind in (RowKind.BF16, RowKind.FP32):
        return rotated, weights.clone()
    stored = encode_rows(rotated.flatten(0, 1), row_format, impl="reference")
    numbers, scales = decode_rows(stored, row_format, impl="reference")
    rounded_weights = weights.clone() if scales is None else weights * scales.view(weights.shape)
    return numbers.bfloat16().view(flat.shape), rounded_weights


def _rotate(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """pairs: [H, R]; cos, sin: [R / 2]."""
    rotated = torch.empty(pairs.shape)
    for i in range(cos.shape[0]):
        even, odd = pairs[:, 2 * i].float(), pairs[:, 2 * i + 1].float()
        rotated[:, 2 * i] = even * cos[i] - odd * sin[i]
        rotated[:, 2 * i + 1] = odd * cos[i] + even * sin[i]
    return rotated.to(pairs.dtype)
