"""All program kinds in one compiled call. Contract: `reference.py`; sums run in lanes of 16 numbers, bytes are the format's exactly."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.cache_rows import described_planes
from glm_runtime.ops.fused_norm_rope.reference import IndexKeys, LatentNorms, MaterialisedKeys
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.paged_cache import CacheRegion

_OP = "fused_norm_rope"


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
) -> Tensor:
    """Contract: `reference.fused_norm_rope`. Raises ValueError for dtypes other than fp32 and bf16, and norms of several dtypes."""
    q_rank, kv_rank, half = norms.q_weight.shape[0], norms.kv_weight.shape[0], cos.shape[1]
    is_bf16 = is_bf16_rows(_OP, "projected", projected)
    query_latent = torch.empty(projected.shape[0], q_rank, dtype=projected.dtype)
    weights = [norms.q_weight, norms.kv_weight]
    raw, raw_stride, width, key_eps, region = None, 0, 0, 0.0, None
    if index is not None:
        weights += [index.norm.weight, index.norm.bias]
        raw, raw_stride, width = index.raw.data_ptr(), index.raw.stride(0), index.raw.shape[1]
        key_eps, region = index.norm.eps, index.region
        if is_bf16_rows(_OP, "index.raw", index.raw) != is_bf16:
            raise ValueError(f"{_OP}: index.raw is {index.raw.dtype} beside a projection of {projected.dtype}")
    kinds = {is_bf16_rows(_OP, "norms", weight) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"{_OP}: norms are {[str(weight.dtype) for weight in weights]}; expected one dtype")
    key_rows = index_rows = None
    if materialised is not None:
        key_rows = materialised.rows.data_ptr()
        index_rows = None if materialised.index_keys is None else materialised.index_keys.data_ptr()
    library().glm_fused_norm_rope(
        projected.data_ptr(), projected.stride(0), raw, raw_stride, is_bf16,
        *(weight.data_ptr() for weight in weights), *(None,) * (4 - len(weights)), kinds.pop(),
        cos.contiguous().data_ptr(), sin.contiguous().data_ptr(), slots.contiguous().data_ptr(),
        None if mla is None else described_planes(mla.row_format, mla.planes),
        None if region is None else described_planes(region.row_format, region.planes),
        query_latent.data_ptr(), key_rows, index_rows, *_rows_to_clear(lists),
        projected.shape[0], q_rank, kv_rank, 2 * half, width, norms.eps, key_eps,
    )  # fmt: skip
    return query_latent


def _rows_to_clear(lists: Tensor | None) -> tuple[int | None, int, int]:
    """Address, bytes from row to row, bytes of a row."""
    if lists is None:
        return None, 0, 0
    if lists.stride(1) != 1 or lists.dtype.is_floating_point:
        raise ValueError(f"{_OP}: lists are {lists.dtype} with strides {lists.stride()}; expected integers, contiguous rows")
    return lists.data_ptr(), lists.stride(0) * lists.element_size(), lists.shape[1] * lists.element_size()
