"""The compiled form. Contract: `reference.py`; sums of squares run in lanes of 16 numbers."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.embed_eh_norm.reference import EhNorms
from glm_runtime.ops.impl import is_bf16_rows


def embed_eh_norm(tokens: Tensor, positions: Tensor, hidden: Tensor, embedding: Tensor, norms: EhNorms) -> Tensor:
    """Contract: `reference.embed_eh_norm`. Raises ValueError for dtypes other than fp32 and bf16, and norms of two dtypes."""
    weights_are_bf16 = is_bf16_rows("embed_eh_norm", "norms.embedding", norms.embedding)
    if is_bf16_rows("embed_eh_norm", "norms.hidden", norms.hidden) != weights_are_bf16:
        raise ValueError(f"embed_eh_norm: norms are {norms.embedding.dtype} and {norms.hidden.dtype}; expected one dtype")
    is_bf16 = is_bf16_rows("embed_eh_norm", "hidden", hidden)
    tokens, positions, embedding = tokens.contiguous(), positions.contiguous(), embedding.contiguous()
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, 2 * width, dtype=hidden.dtype)
    library().glm_embed_eh_norm(
        tokens.data_ptr(), positions.data_ptr(), hidden.data_ptr(), hidden.stride(0),
        embedding.data_ptr(), is_bf16_rows("embed_eh_norm", "embedding", embedding),
        norms.embedding.data_ptr(), norms.hidden.data_ptr(), weights_are_bf16,
        out.data_ptr(), is_bf16, num_rows, width, norms.eps,
    )  # fmt: skip
    return out
