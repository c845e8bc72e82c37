"""The query side in one pass over the rows. Contract: `reference.py`, bit for bit."""

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import ROW_KINDS
from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.row_format import RowFormat, RowKind

WIDEST_QUERY = 1024
"""Numbers that `glm_index_queries` has room for."""


def fused_q(heads: Tensor, absorbed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Contract: `reference.fused_q`."""
    num_rows, num_heads, width = heads.shape
    heads = heads if heads.stride(1) == width else heads.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    is_bf16 = is_bf16_rows("fused_q", "heads", heads)
    absorbed = absorbed.to(heads.dtype)
    rope, latent = 2 * cos.shape[1], absorbed.shape[2]
    queries = torch.empty(num_rows, num_heads, latent + rope, dtype=heads.dtype)
    library().glm_fused_q(
        heads.data_ptr(), heads.stride(0), absorbed.data_ptr(), absorbed.stride(0), absorbed.stride(1), is_bf16,
        cos.data_ptr(), sin.data_ptr(), num_rows, num_heads, width - rope, rope, latent, queries.data_ptr(),
    )  # fmt: skip
    return queries


def index_queries(flat: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """Contract: `reference.index_queries`. Raises ValueError for queries that are wider than `WIDEST_QUERY`."""
    num_rows, num_heads, width = flat.shape
    if width > WIDEST_QUERY:
        raise ValueError(f"index_queries: queries are {width} wide; the compiled kernel takes at most {WIDEST_QUERY}")
    flat = flat if flat.stride(1) == width else flat.contiguous()
    weights, cos, sin = weights.contiguous(), cos.contiguous(), sin.contiguous()
    is_bf16 = is_bf16_rows("index_queries", "flat", flat)
    is_plain = row_format.kind in (RowKind.BF16, RowKind.FP32)
    queries = torch.empty(num_rows, num_heads, width, dtype=flat.dtype if is_plain else torch.bfloat16)
    rounded_weights = torch.empty(num_rows, num_heads)
    library().glm_index_queries(
        flat.data_ptr(), flat.stride(0), is_bf16, weights.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        num_rows, num_heads, width, 2 * cos.shape[1], ROW_KINDS[row_format.kind], queries.data_ptr(), rounded_weights.data_ptr(),
    )  # fmt: skip
    return queries, rounded_weights
