"""The specification of attention in expanded form, one sequence.

Legend: `T` rows, `S` = start + T context tokens, `H` heads, `N` nope dim, `R` rope dim, `V` value head dim, `K` list width.
"""

import torch
from torch import Tensor


def dense_mla(queries: Tensor, rebuilt: Tensor, shared_key: Tensor, lists: Tensor | None, start: int, scale: float) -> Tensor:
    """o[t] = softmax of scale * (q[t] . [k_n[s] | kpe[s]]) over s <= start + t, or over those of row t's list, times v[s].

    Source: FACTS 3.7, non-absorbed. queries: [T, H, N + R], rotated; rebuilt: [S, H, N + V] = [k_n | v]; shared_key: [S, R], kpe;
    lists: [T, K] int64 tokens up to the row's own, -1 after the last, at least one a row. Returns [T, H, V] of queries' dtype, new.
    Rounds: the result once, to queries' dtype; nothing else below fp32.
    """
    num_rows, num_heads, width = queries.shape
    nope = width - shared_key.shape[1]
    keys = torch.cat((rebuilt[..., :nope], shared_key[:, None].expand(-1, num_heads, -1)), dim=-1).float()
    attended = torch.empty(num_rows, num_heads, rebuilt.shape[2] - nope)
    for row in range(num_rows):
        seen = torch.arange(start + row + 1) if lists is None else lists[row][lists[row] >= 0]
        logits = torch.einsum("hd,shd->hs", queries[row].float(), keys[seen]) * scale
        attended[row] = torch.einsum("hs,shv->hv", torch.softmax(logits, dim=-1), rebuilt[seen][..., nope:].float())
    return attended.to(queries.dtype)
