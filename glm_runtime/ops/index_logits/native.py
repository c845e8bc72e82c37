"""Index scores in tiles of 64 keys, decoded once for all rows of a sequence. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import index_keys
from glm_runtime.native.library import library
from glm_runtime.paged_cache import CacheRegion


def index_logits(queries: Tensor, weights: Tensor, keys: CacheRegion, block_tables: Tensor, positions: Tensor) -> Tensor:
    """Contract: `reference.index_logits`. Each score is one chain over the width and one over the heads, both ascending.

    bf16 queries beside keys of any format but fp32 are multiplied as bf16, sums in fp32; otherwise everything is fp32.
    """
    num_sequences, num_rows, num_heads, width = queries.shape
    queries, weights = queries.contiguous(), weights.contiguous()
    block_tables, positions = block_tables.contiguous(), positions.contiguous()
    scores = torch.empty(num_sequences, num_rows, block_tables.shape[1] * keys.block_size_tokens)
    if positions.numel():
        library().glm_index_logits(
            queries.data_ptr(), queries.dtype == torch.bfloat16, weights.data_ptr(), num_sequences, num_rows, num_heads, width,
            *index_keys(keys), block_tables.data_ptr(), block_tables.shape[1], positions.data_ptr(), scores.data_ptr(),
        )  # fmt: skip
    return scores
