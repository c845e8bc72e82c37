"""The merge by searching the threshold bit by bit over ranks, row by row. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.library import library


def merge_topk(scores: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Contract: `reference.merge_topk`."""
    num_parts, num_rows, width = scores.shape
    scores, tokens = scores.contiguous(), tokens.contiguous()
    lists = torch.empty(num_rows, k, dtype=torch.int64)
    library().glm_merge_topk(scores.data_ptr(), tokens.data_ptr(), num_parts, num_rows, width, k, lists.data_ptr())
    return lists
