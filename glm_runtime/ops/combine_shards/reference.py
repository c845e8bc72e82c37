"""The specification of the combination. Legend: `W` parts of the context, `T` rows, `H` heads, `C` latent rank."""

import math

import torch
from torch import Tensor


def shard_weights(lse: Tensor) -> Tensor:
    """w_r = exp(LSE_r - LSE*), LSE* = log sum_r exp(LSE_r), natural. Source: FACTS 6.4, step 5.

    lse: [W, T, H] fp32. A part without tokens has LSE -inf, and kernels that leave NaN or +inf there mean the same: it weighs 0. Where no
    part has tokens all weigh 0. Returns [W, T, H] fp32, new. Rounds: once, from fp64.
    """
    weights = torch.zeros(lse.shape)
    for row in range(lse.shape[1]):
        for head in range(lse.shape[2]):
            logs = [log if math.isfinite(log) else -math.inf for log in lse[:, row, head].tolist()]
            highest = max(logs)
            if highest > -math.inf:
                parts = [math.exp(log - highest) for log in logs]
                weights[:, row, head] = torch.tensor([part / math.fsum(parts) for part in parts])
    return weights


def combine_shards(attended: Tensor, lse: Tensor) -> Tensor:
    """o = sum_r w_r o_r with the weights above.

    attended: [W, T, H, C], bf16 or fp32, 0 for a part without tokens; lse: [W, T, H] fp32. Returns [T, H, C] fp32, new.
    A NaN in an output stays, whatever its part weighs: damage shows. Rounds: weights, each product and each sum to fp32, in order of parts.
    """
    weights = shard_weights(lse)
    combined = weights[0, ..., None] * attended[0].float()
    for part in range(1, attended.shape[0]):
        combined = combined + weights[part, ..., None] * attended[part].float()
    return combined
