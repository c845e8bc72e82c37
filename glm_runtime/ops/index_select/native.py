"""Scores and top-k in one compiled call; scores live in scratch memory, as many rows at a time as the budget holds.

Contract: `reference.py`. Keys of a tile are decoded once for up to 16 rows of a sequence.
"""

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import index_keys
from glm_runtime.native.library import library
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import StepBatch


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheRegion,
    batch: StepBatch,
    topk: int,
    lists: Tensor,
    scores: Tensor | None,
    scratch_bytes: int,
) -> None:
    """Contract: `reference.index_select`; products as `index_logits.native`."""
    num_rows, num_heads, width = queries.shape
    queries, weights, block_tables = queries.contiguous(), weights.contiguous(), batch.block_tables.contiguous()
    row_sequences, visible = batch.row_sequences.contiguous(), batch.visible.contiguous()
    library().glm_index_select(
        queries.data_ptr(), queries.dtype == torch.bfloat16, weights.data_ptr(), num_rows, num_heads, width, *index_keys(keys),
        block_tables.data_ptr(), block_tables.shape[1], row_sequences.data_ptr(), visible.data_ptr(),
        topk, lists.shape[1], scratch_bytes, lists.data_ptr(), None if scores is None else scores.data_ptr(),
    )  # fmt: skip
