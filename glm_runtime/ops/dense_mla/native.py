"""Expanded attention head by head, in blocks of rows against tiles of keys. Contract: `reference.py`.

Rounds, beside what the contract says: with bf16 queries the softmax weights to bf16 before they meet the values.
"""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows


def dense_mla(queries: Tensor, rebuilt: Tensor, shared_key: Tensor, lists: Tensor | None, start: int, scale: float) -> Tensor:
    """Contract: `reference.dense_mla`."""
    num_rows, num_heads, width = queries.shape
    rope = shared_key.shape[1]
    queries, rebuilt = queries.contiguous(), rebuilt.to(queries.dtype).contiguous()
    shared_key = shared_key.to(queries.dtype)
    shared_key = shared_key if shared_key.stride(1) == 1 else shared_key.contiguous()
    lists = None if lists is None else lists.contiguous()
    attended = torch.empty(num_rows, num_heads, rebuilt.shape[2] - width + rope, dtype=queries.dtype)
    library().glm_dense_mla(
        queries.data_ptr(), is_bf16_rows("dense_mla", "queries", queries), num_rows, num_heads, width - rope, rope, attended.shape[2],
        rebuilt.data_ptr(), shared_key.data_ptr(), shared_key.stride(0), None if lists is None else lists.data_ptr(),
        0 if lists is None else lists.shape[1], start, scale, attended.data_ptr(),
    )  # fmt: skip
    return attended
