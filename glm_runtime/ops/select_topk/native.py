"""Top-k by searching the threshold bit by bit over ranks, then one pass that lists. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.library import library


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Contract: `reference.select_topk`."""
    scores, visible = scores.contiguous(), visible.contiguous()
    lists = torch.empty(scores.shape[0], k, dtype=torch.int64)
    library().glm_select_topk(scores.data_ptr(), scores.shape[0], scores.shape[1], visible.data_ptr(), k, lists.data_ptr())
    return lists
