"""Norms and rotations of one layer's projections, and the stores into both caches."""

from torch import Tensor

from glm_runtime.ops.fused_norm_rope import native, reference
from glm_runtime.ops.fused_norm_rope.reference import IndexKeyNorm, IndexKeys, LatentNorms, MaterialisedKeys
from glm_runtime.ops.impl import Impl, check_shape, check_width
from glm_runtime.paged_cache import CacheRegion

__all__ = ["IndexKeyNorm", "IndexKeys", "LatentNorms", "MaterialisedKeys", "fused_norm_rope"]

_OP = "fused_norm_rope"


def fused_norm_rope(
    projected: Tensor,
    norms: LatentNorms,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    mla: CacheRegion | None,
    *,
    index: IndexKeys | None = None,
    lists: Tensor | None = None,
    materialised: MaterialisedKeys | None = None,
    impl: Impl | None = None,
) -> Tensor:
    """Normalise the query latent; make this step's keys and store them in both caches. See `reference.py`.

    mla: None stores no MLA rows. index: on layers with an indexer. lists: top-k rows to clear. materialised: buffers to fill with the
    keys. Whole-tensor torch, which the reference already is, serves where the compiled kernels do not.
    Raises ValueError for shapes that do not fit together.
    """
    num_rows, rope_dim = projected.shape[0], 2 * cos.shape[1]
    q_rank, kv_rank = norms.q_weight.shape[0], norms.kv_weight.shape[0]
    check_shape(_OP, "projected", projected, (-1, q_rank + kv_rank + rope_dim))
    check_shape(_OP, "cos", cos, (num_rows, -1))
    check_shape(_OP, "sin", sin, (num_rows, rope_dim // 2))
    check_shape(_OP, "slots", slots, (num_rows,))
    if mla is not None:
        check_width(_OP, "mla", mla, kv_rank + rope_dim)
    if index is not None:
        _check_index(index, num_rows)
    if lists is not None:
        check_shape(_OP, "lists", lists, (num_rows, -1))
    if materialised is not None:
        _check_materialised(materialised, projected, kv_rank + rope_dim, index)
    if impl == "native":
        return native.fused_norm_rope(projected, norms, cos, sin, slots, mla, index, lists, materialised)
    return reference.fused_norm_rope(projected, norms, cos, sin, slots, mla, index, lists, materialised, impl)


def _check_index(index: IndexKeys, num_rows: int) -> None:
    width = index.norm.weight.shape[0]
    check_shape(_OP, "index.raw", index.raw, (num_rows, width))
    check_shape(_OP, "index.norm.bias", index.norm.bias, (width,))
    if index.region is not None:
        check_width(_OP, "index.region", index.region, width)


def _check_materialised(materialised: MaterialisedKeys, projected: Tensor, width: int, index: IndexKeys | None) -> None:
    check_shape(_OP, "materialised.rows", materialised.rows, (projected.shape[0], width))
    buffers = [materialised.rows]
    if materialised.index_keys is not None:
        if index is None:
            raise ValueError(f"{_OP}: materialised.index_keys on a layer without index keys")
        check_shape(_OP, "materialised.index_keys", materialised.index_keys, tuple(index.raw.shape))
        buffers.append(materialised.index_keys)
    for buffer in buffers:
        if buffer.dtype is not projected.dtype or not buffer.is_contiguous():
            raise ValueError(f"{_OP}: materialised buffers are {buffer.dtype}; expected {projected.dtype}, contiguous")
