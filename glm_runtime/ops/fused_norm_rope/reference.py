"""The specification of what a layer writes into its caches.

Legend: `T` rows, `Q` query rank, `C` latent rank, `R` rope dim, `D` index head dim, `K` top-k.
Program kinds of a kernel, by row: 0 index key, 1 key latent and shared key, 2 query latent, 3 clears the row of the top-k lists.
Where a row's slot is negative (padding, or another rank's token) kind 2 runs, kind 3 runs, kind 1 runs if keys are materialised but
stores nothing, and kind 0 does not run. Source: FACTS 4.3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from glm_runtime.norm import layer_norm, rms_norm
from glm_runtime.ops.cache_rows import store_rows
from glm_runtime.ops.impl import Impl
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.rope import rotate_interleaved


class LatentNorms(NamedTuple):
    """Weights of the two latent norms: [Q] and [C]; eps is the config's, which transformers does not use here."""

    q_weight: Tensor
    kv_weight: Tensor
    eps: float


class IndexKeyNorm(NamedTuple):
    """LayerNorm of the index key: weight and bias [D]."""

    weight: Tensor
    bias: Tensor
    eps: float


class IndexKeys(NamedTuple):
    """What kind 0 needs, on layers with an indexer. raw: [T, D] — the projection. region: None stores no index keys."""

    raw: Tensor
    norm: IndexKeyNorm
    region: CacheRegion | None


class MaterialisedKeys(NamedTuple):
    """Buffers for the keys as they are before the cache's rounding: what ranks gather that share a prefill (PCP).

    rows: [T, C + R] — latents beside shared keys, as `store_rows` takes them. index_keys: [T, D], where the layer has an indexer. Both
    contiguous, in the dtype of the projection. Rows of index_keys whose slot is negative become zero.
    """

    rows: Tensor
    index_keys: Tensor | None = None


def fused_norm_rope(
    projected: Tensor,
    norms: LatentNorms,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    mla: CacheRegion | None,
    index: IndexKeys | None,
    lists: Tensor | None,
    materialised: MaterialisedKeys | None,
    impl: Impl | None,
) -> Tensor:
    """[qc | c | kpe] = projected; qc' = RMS(qc); mla[slot] = [RMS(c) | rotate(kpe)]; index[slot] = rotate(LayerNorm(raw)).

    The index key's *first* R dims are rotated, the others pass. Source: FACTS 3.3 and 3.4, GlmMoeDsaAttention.
    projected: [T, Q + C + R]. cos, sin: [T, R / 2] fp32. slots: [T] int64. lists: [T, K] of any integer type, becomes -1.
    Returns qc': [T, Q] of projected's dtype, new.
    Rounds: each norm and each rotation once to projected's dtype, then as the cache's format does (`cache_rows`).
    """
    q_rank, kv_rank = norms.q_weight.shape[0], norms.kv_weight.shape[0]
    if lists is not None:
        lists.fill_(-1)
    latent = rms_norm(projected[:, q_rank : q_rank + kv_rank], norms.kv_weight, norms.eps)
    shared_key = rotate_interleaved(projected[:, q_rank + kv_rank :], cos, sin)
    rows = torch.cat((latent, shared_key), dim=-1)
    if materialised is not None:
        materialised.rows.copy_(rows)
    if mla is not None:
        store_rows(mla, slots, rows, impl=impl)
    if index is not None:
        keys = _index_keys(index, cos, sin)
        if materialised is not None and materialised.index_keys is not None:
            materialised.index_keys.copy_(torch.where((slots >= 0)[:, None], keys, 0.0))
        if index.region is not None:
            store_rows(index.region, slots, keys, impl=impl)
    return rms_norm(projected[:, :q_rank], norms.q_weight, norms.eps)


def _index_keys(index: IndexKeys, cos: Tensor, sin: Tensor) -> Tensor:
    """[rotate(k[:R]) | k[R:]] with k = LayerNorm(raw): [T, D], new. Rounds as `fused_norm_rope`."""
    keys = layer_norm(index.raw, index.norm.weight, index.norm.bias, index.norm.eps)
    rope_dim = 2 * cos.shape[1]
    return torch.cat((rotate_interleaved(keys[:, :rope_dim], cos, sin), keys[:, rope_dim:]), dim=-1)
