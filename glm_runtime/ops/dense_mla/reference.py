"""The specification of dense attention in expanded form, one sequence.

Legend: `T` rows, `S` = start + T context tokens, `H` heads, `D` query head dim, `V` value head dim.
"""

import torch
from torch import Tensor


def dense_mla(queries: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """o[t] = softmax over s <= start + t of scale * (q[t] . k[s]), times v[s]. Source: FACTS 3.7, non-absorbed.

    queries: [T, H, D]; keys: [S, H, D]; values: [S, H, V]. Returns [T, H, V] fp32, new. Rounds: nothing below fp32.
    """
    logits = torch.einsum("thd,shd->hts", queries.float(), keys.float()) * scale
    is_later = torch.arange(keys.shape[0]) > start + torch.arange(queries.shape[0])[:, None]
    weights = torch.softmax(logits.masked_fill(is_later, float("-inf")), dim=-1)
    return torch.einsum("hts,shv->thv", weights, values.float())
