"""The combination in whole-tensor operations. Contract: `reference.py`; weights are fp32 throughout."""

import torch
from torch import Tensor


def shard_weights(lse: Tensor) -> Tensor:
    """Contract: `reference.shard_weights`. A part that alone has tokens weighs exactly 1."""
    logs = torch.where(lse.isfinite(), lse, float("-inf"))
    highest = logs.amax(0).clamp_min_(torch.finfo(torch.float32).min)  # finite where no part has tokens
    parts = (logs - highest).exp_()
    total = parts[0].clone()
    for part in parts[1:]:  # in order of parts
        total += part
    return parts.div_(total.clamp_min_(torch.finfo(torch.float32).tiny))


def combine_shards(attended: Tensor, lse: Tensor) -> Tensor:
    """Contract: `reference.combine_shards`."""
    weights = shard_weights(lse)[..., None]
    combined = weights[0] * attended[0].float()
    for part in range(1, attended.shape[0]):
        combined += weights[part] * attended[part].float()
    return combined
