"""Stores by the compiled kernels. Contract: `reference.py`, bit for bit; only which NaN a bf16 NaN is may differ."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import ROW_KINDS
from glm_runtime.native.library import library
from glm_runtime.ops.cache_rows.cpu import PLAIN_DTYPES
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowFormat

_Described = ctypes.c_int64 * 8


def encode_rows(values: Tensor, row_format: RowFormat) -> tuple[Tensor, ...]:
    """Contract: `reference.encode_rows`: a region of one block that holds all rows."""
    dtype = PLAIN_DTYPES.get(row_format.kind, torch.uint8)
    planes = tuple(torch.empty(1, len(values), size // dtype.itemsize, dtype=dtype) for size in row_format.plane_bytes)
    if len(values):
        _store(row_format, planes, torch.arange(len(values)), values.contiguous())
    return tuple(plane[0] for plane in planes)


def store_rows(region: CacheRegion, slots: Tensor, values: Tensor) -> None:
    """Contract: `store_rows` of the package."""
    _store(region.row_format, region.planes, slots.contiguous(), values if values.stride(-1) == 1 else values.contiguous())


def _store(row_format: RowFormat, planes: Sequence[Tensor], slots: Tensor, values: Tensor) -> None:
    is_bf16 = is_bf16_rows("store_rows", "values", values)
    num_rows, width = values.shape
    described = described_planes(row_format, planes)
    library().glm_store_rows(values.data_ptr(), values.stride(0), is_bf16, slots.data_ptr(), described, num_rows, width)


def described_planes(row_format: RowFormat, planes: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_int64]":
    """What a kernel needs to store rows: address, bytes a block and bytes a token of numbers and of scales, format, tokens a block."""
    strides = []
    for plane in (planes[0], planes[-1]):
        size = plane.element_size()
        strides += [plane.data_ptr(), plane.stride(0) * size, plane.stride(1) * size]
    return _Described(*strides, ROW_KINDS[row_format.kind], planes[0].shape[1])
