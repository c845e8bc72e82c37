"""The specification of the best token. Legend: `M` rows, `V` tokens of the shard."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Best:
    """values: [M] fp32, ids: [M] int64 — token ids of the whole vocabulary. is_finite: [M] bool — of the row's logits, all of them."""

    values: Tensor
    ids: Tensor
    is_finite: Tensor


def vocab_argmax(logits: Tensor, first_id: int) -> Best:
    """The largest logit of each row; of equal ones the smallest id. -0 equals +0.

    A NaN is larger than every number, and the first one is the result: damage shows instead of a token that happens to be second.
    logits: [M, V] fp32 or bf16. Rounds: nothing.
    """
    values, ids, is_finite = [], [], []
    for row in logits.float().tolist():
        best = 0
        for place, logit in enumerate(row):
            if not math.isnan(row[best]) and (math.isnan(logit) or logit > row[best]):
                best = place
        values.append(row[best])
        ids.append(first_id + best)
        is_finite.append(all(math.isfinite(logit) for logit in row))
    return Best(torch.tensor(values, dtype=torch.float32), torch.tensor(ids, dtype=torch.int64), torch.tensor(is_finite, dtype=torch.bool))
