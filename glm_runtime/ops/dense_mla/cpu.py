"""Dense attention over as many rows at a time as the scratch budget allows, each reading only the keys it sees.

Contract: `reference.py`.
"""

import torch
from torch import Tensor


def dense_mla(queries: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, scratch_bytes: int) -> Tensor:
    """Contract: `reference.dense_mla`. scratch_bytes: bound of the scores, at least one row is done at a time."""
    num_rows, num_heads, _ = queries.shape
    wide_queries = (queries.float() * scale).transpose(0, 1).contiguous()  # [H, T, D]
    wide_keys = keys.float().permute(1, 2, 0).contiguous()  # [H, D, S]
    wide_values = values.float().transpose(0, 1).contiguous()  # [H, S, V]
    attended = torch.empty(num_rows, num_heads, values.shape[2])
    step = max(1, scratch_bytes // (num_heads * keys.shape[0] * 4))
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        context = start + last
        logits = torch.bmm(wide_queries[:, first:last], wide_keys[:, :, :context])
        is_later = torch.arange(context) > start + torch.arange(first, last)[:, None]
        weights = torch.softmax(logits.masked_fill_(is_later, float("-inf")), dim=-1)
        attended[first:last] = torch.bmm(weights, wide_values[:, :context]).transpose(0, 1)
    return attended
