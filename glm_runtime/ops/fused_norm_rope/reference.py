"""The specification of what a layer writes into its caches.

Legend: `T` rows, `Q` query rank, `C` latent rank, `R` rope dim, `D` index head dim.
Program kinds on a GPU: 0 index key, 1 key latent and shared key, 2 query latent, 3 clear the top-k rows (lists are made fresh here).
Padding rows (slot -1) are normalised and stored nowhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.norm import layer_norm, rms_norm
from glm_runtime.ops.cache_rows import store_rows
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.rope import rotate_interleaved


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """Weights of the two latent norms: [Q] and [C]; eps is the config's, which transformers does not use here."""

    q_weight: Tensor
    kv_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class IndexKeyNorm:
    """LayerNorm of the index key: weight and bias [D]."""

    weight: Tensor
    bias: Tensor
    eps: float


def fused_norm_rope(projected: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor, slots: Tensor, mla: CacheRegion) -> Tensor:
    """[qc | c | kpe] = projected; qc' = RMS(qc); cache[slot] = [RMS(c) | rotate(kpe)]. Source: FACTS 3.3, GlmMoeDsaAttention.

    projected: [T, Q + C + R]. cos, sin: [T, R / 2] fp32. slots: [T] int64, -1 stores nothing.
    Returns qc': [T, Q] of projected's dtype, new; is computed for padding rows too.
    Rounds: each norm and the rotation once to projected's dtype, then as the cache's format does (`cache_rows`).
    """
    q_rank, kv_rank = norms.q_weight.shape[0], norms.kv_weight.shape[0]
    query_latent = rms_norm(projected[:, :q_rank], norms.q_weight, norms.eps)
    latent = rms_norm(projected[:, q_rank : q_rank + kv_rank], norms.kv_weight, norms.eps)
    shared_key = rotate_interleaved(projected[:, q_rank + kv_rank :], cos, sin)
    store_rows(mla, slots, torch.cat((latent, shared_key), dim=-1))
    return query_latent


def store_index_keys(raw_keys: Tensor, norm: IndexKeyNorm, cos: Tensor, sin: Tensor, slots: Tensor, index: CacheRegion) -> None:
    """cache[slot] = [rotate(k[:R]) | k[R:]] with k = LayerNorm(raw). The *first* R dims are rotated, interleaved. Source: FACTS 3.4.

    raw_keys: [T, D]; cos, sin: [T, R / 2] fp32; slots: [T] int64, -1 stores nothing. Rounds as `fused_norm_rope`.
    """
    keys = layer_norm(raw_keys, norm.weight, norm.bias, norm.eps)
    rope_dim = 2 * cos.shape[1]
    rotated = rotate_interleaved(keys[:, :rope_dim], cos, sin)
    store_rows(index, slots, torch.cat((rotated, keys[:, rope_dim:]), dim=-1))
