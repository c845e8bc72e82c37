"""The specification of sparse attention on latents.

Legend: `T` rows, `H` heads, `C` latent rank, `R` rope dim, `W` list width.
"""

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows
from glm_runtime.paged_cache import CacheRegion


def sparse_mla(queries: Tensor, mla: CacheRegion, addresses: Tensor, latent_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """p = softmax over the list of scale * (q . row), z = sum p * row[:C], lse = log sum exp(scale * (q . row)). Source: FACTS 3.7.

    queries: [T, H, C + R], [absorbed query | rotated query]; mla: rows [latent | shared key] of C + R numbers, in
    any format of one plane; addresses: [T, W] int64 into its `rows`, -1 after the last. Returns z [T, H, C] fp32 and lse [T, H] fp32,
    natural log, both new.
    A row with an empty list gets z = 0 and lse = -inf. What lies at unlisted addresses, NaN included, has no effect.
    Rounds: nothing below fp32; rows are read as the cache stores them.
    """
    attended = torch.zeros(*queries.shape[:2], latent_dim)
    lse = torch.full(queries.shape[:2], float("-inf"))
    for row, listed in enumerate(addresses):
        keys, _ = decode_rows((mla.rows[listed[listed >= 0]],), mla.row_format)
        if keys.shape[0]:
            logits = torch.einsum("hd,wd->hw", queries[row].float(), keys) * scale
            lse[row] = torch.logsumexp(logits, dim=-1)
            attended[row] = torch.einsum("hw,wc->hc", torch.softmax(logits, dim=-1), keys[:, :latent_dim])
    return attended, lse
