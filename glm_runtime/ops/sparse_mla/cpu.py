"""Sparse MLA as two batched matrix products over gathered rows, a few query rows at a time. Contract: `reference.py`.

Each query row is its own item of the products, of a shape that depends on nothing but H and the list's width; so its bits depend
on its own list only, as long as lists have one width and the same tokens in the same order.
"""

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import decode_rows
from glm_runtime.paged_cache import CacheRegion


def sparse_mla(
    queries: Tensor, mla: CacheRegion, addresses: Tensor, latent_dim: int, scale: float, scratch_bytes: int
) -> tuple[Tensor, Tensor]:
    """Contract: `reference.sparse_mla`. scratch_bytes: bound of the gathered rows, at least one query row is done at a time."""
    num_rows, num_heads, width = queries.shape
    list_width = addresses.shape[1]
    attended = torch.empty(num_rows, num_heads, latent_dim)
    lse = torch.empty(num_rows, num_heads)
    step = min(num_rows, max(1, scratch_bytes // max(1, list_width * width * 4)))
    # Two buffers for all pieces: fresh pages for each would cost more than the arithmetic.
    stored, wide = mla.rows.new_empty(step * list_width, mla.rows.shape[1]), torch.empty(step * list_width, width)
    for start in range(0, num_rows, step):
        piece = slice(start, start + step)
        keys, is_padding = _gather(mla, addresses[piece], stored, wide)
        logits = torch.bmm(queries[piece].float(), keys.transpose(1, 2)).mul_(scale)  # [t, H, W]
        if is_padding is not None:
            logits.masked_fill_(is_padding[:, None, :], float("-inf"))
        highest = logits.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)  # finite for an empty list
        weights = logits.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        # The largest weight is exactly 1, so the clamp only changes the total of an empty list, which is 0.
        attended[piece] = torch.bmm(weights, keys[..., :latent_dim]).div_(total.clamp_min(1.0))
        lse[piece] = (highest + total.log()).squeeze(-1)
    return attended, lse


def _gather(mla: CacheRegion, addresses: Tensor, stored: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """The listed rows in fp32 [t, W, D], zeros for padding (0 x NaN would be NaN), and where padding is, if anywhere.

    stored, wide: at least t * W rows, as the cache stores them and as fp32 numbers; the result is a view of `wide`.
    """
    count = addresses.numel()
    is_padding = addresses < 0
    torch.index_select(mla.rows, 0, addresses.clamp_min(0).view(-1), out=stored[:count])
    keys, _ = decode_rows((stored[:count],), mla.row_format, out=wide[:count])
    if not is_padding.any():
        return keys.view(*addresses.shape, -1), None
    keys[is_padding.view(-1)] = 0.0
    return keys.view(*addresses.shape, -1), is_padding
