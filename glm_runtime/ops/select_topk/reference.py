"""The specification of the deterministic top-k.

Order: larger score first, then smaller token index; -0.0 equals +0.0; NaN of either sign comes after everything else.
"""

import torch
from torch import Tensor

from glm_runtime.score_order import sort_key


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The min(k, visible) best of the first `visible` tokens of each row, as ascending token positions. Source: FACTS 3.6.

    scores: [T, S] fp32; columns from `visible` on may hold anything. visible: [T] int64, at most S.
    Returns [T, k] int64, new; -1 after the last. Rounds: nothing.
    """
    lists = torch.full((scores.shape[0], k), -1, dtype=torch.int64)
    for row, (values, count) in enumerate(zip(scores.tolist(), visible.tolist(), strict=True)):
        ranked = sorted(range(count), key=lambda token: (*sort_key(values[token]), token))
        best = sorted(ranked[:k])
        lists[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return lists
