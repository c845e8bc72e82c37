"""The query side in whole-tensor operations. Contract: `reference.py`, bit for bit."""

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import round_queries
from glm_runtime.rope import rotate_interleaved
from glm_runtime.row_format import RowFormat, RowKind


def fused_q(heads: Tensor, absorbed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Contract: `reference.fused_q`."""
    rotary = heads[..., heads.shape[2] - 2 * cos.shape[1] :]
    return torch.cat((absorbed, rotate_interleaved(rotary, cos[:, None], sin[:, None])), dim=-1)


def index_queries(flat: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """Contract: `reference.index_queries`."""
    rope = 2 * cos.shape[1]
    rotated = torch.cat((rotate_interleaved(flat[..., :rope], cos[:, None], sin[:, None]), flat[..., rope:]), dim=-1)
    queries, rounded_weights = round_queries(rotated, weights, row_format)
    is_plain = row_format.kind in (RowKind.BF16, RowKind.FP32)
    return queries if is_plain else queries.bfloat16(), rounded_weights
