"""Expanded attention over as many rows at a time as the scratch budget allows, each reading only the keys it sees.

Contract: `reference.py`.
"""

import torch
from torch import Tensor


def dense_mla(
    queries: Tensor, rebuilt: Tensor, shared_key: Tensor, lists: Tensor | None, start: int, scale: float, scratch_bytes: int
) -> Tensor:
    """Contract: `reference.dense_mla`. scratch_bytes: bound of the scores, at least one row is done at a time."""
    num_rows, num_heads, width = queries.shape
    nope, size = width - shared_key.shape[1], rebuilt.shape[0]
    wide_queries = (queries.float() * scale).transpose(0, 1).contiguous()  # [H, T, D]
    wide_keys = torch.empty(num_heads, width, size)  # [H, D, S]
    wide_keys[:, :nope] = rebuilt[..., :nope].permute(1, 2, 0)
    wide_keys[:, nope:] = shared_key.t()
    wide_values = rebuilt[..., nope:].float().transpose(0, 1).contiguous()  # [H, S, V]
    attended = torch.empty(num_rows, num_heads, wide_values.shape[2])
    step = max(1, scratch_bytes // (num_heads * size * 4))
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        context = start + last
        logits = torch.bmm(wide_queries[:, first:last], wide_keys[:, :, :context])
        logits.masked_fill_(_is_hidden(lists, start, first, last), float("-inf"))
        weights = torch.softmax(logits, dim=-1)
        attended[first:last] = torch.bmm(weights, wide_values[:, :context]).transpose(0, 1)
    return attended.to(queries.dtype)


def _is_hidden(lists: Tensor | None, start: int, first: int, last: int) -> Tensor:
    """[last - first, start + last]: which tokens a row does not attend to."""
    if lists is None:
        return torch.arange(start + last) > start + torch.arange(first, last)[:, None]
    # Padding goes to one more column, which is cut off again.
    listed = torch.where(lists[first:last] < 0, start + last, lists[first:last])
    is_hidden = torch.ones(last - first, start + last + 1, dtype=torch.bool)
    return is_hidden.scatter_(1, listed, False)[:, : start + last]
