"""Stores by the compiled kernels. Contract: `reference.py`, bit for bit; only which NaN a bf16 NaN is may differ."""

import ctypes

import torch
from torch import Tensor

from glm_runtime.native.cached_rows import ROW_KINDS, index_keys
from glm_runtime.native.library import library
from glm_runtime.ops.cache_rows.cpu import PLAIN_DTYPES
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.paged_cache import CacheRegion, strides_in_bytes
from glm_runtime.row_format import RowFormat

WIDEST_LOADED_ROW = 4064
"""Numbers that `glm_load_blocks` has room for beside the whole vectors that it writes."""

_Described = ctypes.c_int64 * 8


def encode_rows(values: Tensor, row_format: RowFormat) -> tuple[Tensor, ...]:
    """Contract: `reference.encode_rows`: a region of one block that holds all rows."""
    dtype = PLAIN_DTYPES.get(row_format.kind, torch.uint8)
    planes = tuple(torch.empty(1, len(values), size // dtype.itemsize, dtype=dtype) for size in row_format.plane_bytes)
    if len(values):
        described = _Described(*strides_in_bytes(planes), ROW_KINDS[row_format.kind], len(values))
        _store(described, torch.arange(len(values)), values.contiguous())
    return tuple(plane[0] for plane in planes)


def store_rows(region: CacheRegion, slots: Tensor, values: Tensor) -> None:
    """Contract: `store_rows` of the package."""
    _store(described_region(region), slots.contiguous(), values if values.stride(-1) == 1 else values.contiguous())


def _store(described: "ctypes.Array[ctypes.c_int64]", slots: Tensor, values: Tensor) -> None:
    is_bf16 = is_bf16_rows("store_rows", "values", values)
    num_rows, width = values.shape
    library().glm_store_rows(values.data_ptr(), values.stride(0), is_bf16, slots.data_ptr(), described, num_rows, width)


def described_region(region: CacheRegion) -> "ctypes.Array[ctypes.c_int64]":
    """What a kernel needs to store rows: `index_keys(region)` in memory, in this order."""
    return _Described(*index_keys(region))


def load_sequence(region: CacheRegion, block_ids: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Contract: `load_sequence` of the package. Raises ValueError for rows that are wider than `WIDEST_LOADED_ROW`."""
    width, block_ids = region.row_format.width, block_ids.contiguous()
    if width > WIDEST_LOADED_ROW:
        raise ValueError(f"load_sequence: rows are {width} numbers wide; the compiled kernel takes at most {WIDEST_LOADED_ROW}")
    rows, block_bytes, token_bytes, *_, kind, block_size = index_keys(region)
    numbers = torch.empty(num_tokens, width, dtype=dtype)
    library().glm_load_blocks(
        rows, block_bytes, token_bytes, kind, block_size, block_ids.data_ptr(), num_tokens, width,
        dtype is torch.bfloat16, numbers.data_ptr(),
    )  # fmt: skip
    return numbers
