"""Sparse MLA in one compiled call: rows are decoded tile by tile, once for all heads. Contract: `reference.py`.

A row's bits depend on its own list alone: not on padding, on other rows, or on threads.
"""

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import listed_rows
from glm_runtime.native.library import library
from glm_runtime.paged_cache import CacheRegion


def sparse_mla(
    queries: Tensor, mla: CacheRegion, addresses: Tensor, latent_dim: int, scale: float, uses_bf16: bool
) -> tuple[Tensor, Tensor]:
    """Contract: `reference.sparse_mla`.

    Rounds: with uses_bf16 queries, rows whose scales are no powers of two, and softmax weights to bf16; sums stay fp32.
    """
    num_rows, num_heads, width = queries.shape
    queries, addresses = queries.contiguous(), addresses.contiguous()
    if queries.dtype not in (torch.float32, torch.bfloat16):
        queries = queries.float()
    attended = torch.empty(num_rows, num_heads, latent_dim)
    lse = torch.empty(num_rows, num_heads)
    if num_rows:
        library().glm_sparse_mla(
            queries.data_ptr(), queries.dtype == torch.bfloat16, num_rows, num_heads, width, latent_dim,
            *listed_rows(mla), addresses.data_ptr(), addresses.shape[1], scale, uses_bf16, attended.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
    return attended, lse
