"""All program kinds in one compiled call. Contract: `reference.py`; sums run in lanes of 16 numbers, bytes are the format's exactly."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.cache_rows import described_region
from glm_runtime.ops.fused_norm_rope.reference import IndexKeys, LatentNorms, MaterialisedKeys
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.paged_cache import CacheRegion

_OP = "fused_norm_rope"
_NO_INDEX = (None, 0, 0, None, None, 0.0, None)


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
    is_bf16, weights_are_bf16 = is_bf16_rows(_OP, "projected", projected), is_bf16_rows(_OP, "norms.q_weight", norms.q_weight)
    _check_dtype("norms.kv_weight", norms.kv_weight, norms.q_weight)
    raw, raw_stride, width, key_weight, key_bias, key_eps, region = _NO_INDEX
    if index is not None:
        _check_dtype("index.raw", index.raw, projected)
        _check_dtype("index.norm.weight", index.norm.weight, norms.q_weight)
        _check_dtype("index.norm.bias", index.norm.bias, norms.q_weight)
        raw, raw_stride, width = index.raw.data_ptr(), index.raw.stride(0), index.raw.shape[1]
        key_weight, key_bias, key_eps = index.norm.weight.data_ptr(), index.norm.bias.data_ptr(), index.norm.eps
        region = None if index.region is None else described_region(index.region)
    key_rows = index_rows = None
    if materialised is not None:
        key_rows = materialised.rows.data_ptr()
        index_rows = None if materialised.index_keys is None else materialised.index_keys.data_ptr()
    num_rows, q_rank = projected.shape[0], norms.q_weight.shape[0]
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    query_latent = torch.empty(num_rows, q_rank, dtype=projected.dtype)
    library().glm_fused_norm_rope(
        projected.data_ptr(), projected.stride(0), raw, raw_stride, is_bf16,
        norms.q_weight.data_ptr(), norms.kv_weight.data_ptr(), key_weight, key_bias, weights_are_bf16,
        cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), None if mla is None else described_region(mla), region,
        query_latent.data_ptr(), key_rows, index_rows, *_rows_to_clear(lists),
        num_rows, q_rank, norms.kv_weight.shape[0], 2 * cos.shape[1], width, norms.eps, key_eps,
    )  # fmt: skip
    return query_latent


def _check_dtype(argument: str, tensor: Tensor, other: Tensor) -> None:
    is_bf16_rows(_OP, argument, tensor)
    if tensor.dtype is not other.dtype:
        raise ValueError(f"{_OP}: {argument} is {tensor.dtype}; expected {other.dtype}, as of the others")


def _rows_to_clear(lists: Tensor | None) -> tuple[int | None, int, int]:
    """Address, bytes from row to row, bytes of a row."""
    if lists is None:
        return None, 0, 0
    if lists.stride(1) != 1 or lists.dtype.is_floating_point:
        raise ValueError(f"{_OP}: lists are {lists.dtype} with strides {lists.stride()}; expected integers, contiguous rows")
    return lists.data_ptr(), lists.stride(0) * lists.element_size(), lists.shape[1] * lists.element_size()
