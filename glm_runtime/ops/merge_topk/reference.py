"""The specification of the merge of top-k lists. Legend: `W` ranks, `T` rows, `K` entries of a list.

Order: larger score first, then smaller token; -0.0 equals +0.0; NaN comes after every number, entries without a token after that. It is
the order of `select_topk`: when each rank gives the best of its own tokens, the result is what one rank would have chosen of all.
"""

import torch
from torch import Tensor

from glm_runtime.score_order import sort_key


def merge_topk(scores: Tensor, tokens: Tensor, k: int) -> Tensor:
    """The best k of all ranks' entries, as ascending tokens. Source: FACTS 6.4, step 2.

    scores: [W, T, K] fp32; tokens: [W, T, K] int64, -1 where there is none, whose score may be anything; no token twice in a row.
    Returns [T, k] int64, new; -1 after the last. Rounds: nothing.
    """
    lists = torch.full((scores.shape[1], k), -1, dtype=torch.int64)
    for row in range(scores.shape[1]):
        entries = zip(scores[:, row].flatten().tolist(), tokens[:, row].flatten().tolist(), strict=True)
        ranked = sorted((*sort_key(score), token) for score, token in entries if token >= 0)
        best = sorted(token for _, _, token in ranked[:k])
        lists[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return lists
