"""Norms and rotations of one layer's projections, and the stores into both caches."""

from torch import Tensor

from glm_runtime.ops.fused_norm_rope import reference
from glm_runtime.ops.fused_norm_rope.reference import IndexKeyNorm, LatentNorms
from glm_runtime.ops.impl import check_shape, check_width
from glm_runtime.paged_cache import CacheRegion

__all__ = ["IndexKeyNorm", "LatentNorms", "fused_norm_rope", "store_index_keys"]


def fused_norm_rope(projected: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor, slots: Tensor, mla: CacheRegion) -> Tensor:
    """Normalise the query latent; normalise the key latent, rotate the shared key, and store both. See `reference.py`.

    Serves on every device: the work is a dozen vector operations, which the reference already is.
    Raises ValueError for shapes that do not fit together.
    """
    q_rank, kv_rank, rope_dim = norms.q_weight.shape[0], norms.kv_weight.shape[0], 2 * cos.shape[1]
    check_shape("fused_norm_rope", "projected", projected, (-1, q_rank + kv_rank + rope_dim))
    check_shape("fused_norm_rope", "slots", slots, (projected.shape[0],))
    check_width("fused_norm_rope", "mla", mla, kv_rank + rope_dim)
    return reference.fused_norm_rope(projected, norms, cos, sin, slots, mla)


def store_index_keys(raw_keys: Tensor, norm: IndexKeyNorm, cos: Tensor, sin: Tensor, slots: Tensor, index: CacheRegion) -> None:
    """Normalise and rotate the index keys and store them. See `reference.py`. Raises ValueError as `fused_norm_rope`."""
    check_shape("store_index_keys", "raw_keys", raw_keys, (-1, norm.weight.shape[0]))
    check_shape("store_index_keys", "slots", slots, (raw_keys.shape[0],))
    check_width("store_index_keys", "index", index, norm.weight.shape[0])
    reference.store_index_keys(raw_keys, norm, cos, sin, slots, index)
