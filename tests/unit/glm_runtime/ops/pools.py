"""A poisoned pool with random block tables, for op tests."""

import pytest
import torch
from torch import Tensor

from glm_runtime.native.library import choose_kernels
from glm_runtime.ops.cache_rows import store_rows
from glm_runtime.paged_cache import CacheRegion, PagedCache
from glm_runtime.row_format import RowKind, make_row_format
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.pool_memory import PoolMemory

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(not choose_kernels("auto"), reason="no compiler or no AVX-512: compiled kernels cannot be had here")
)
"""The compiled kernels, as a parameter of tests."""


def poisoned_region(width: int, *, num_blocks: int = 40, block_size: int = 64, encoding: str = "bf16", layers: int = 2) -> CacheRegion:
    """The second layer of a component `width` elements wide, in a pool whose every byte is 0xff: NaN in every
    format that has one.

    Another component follows, so that blocks are strided and a block's stride is no multiple of a row.
    """
    row_format = make_row_format(RowKind(encoding), width)
    component = CacheComponent("tested", tuple(range(layers)), row_format.bytes_per_token, encoding)
    layout = CacheLayout(block_size, (component, CacheComponent("other", (0,), 4 * 33, "bf16")), "m", "t")
    memory = PoolMemory(num_blocks, layout.block_bytes)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    return PagedCache(layout, memory.buffer, num_blocks).region("tested", layers - 1)


def fill(region: CacheRegion, table: Tensor, values: Tensor) -> None:
    """Store values [S, D] as tokens 0 .. S - 1 of a sequence with this block table."""
    tokens = torch.arange(values.shape[0])
    size = region.block_size_tokens
    store_rows(region, table[tokens // size] * size + tokens % size, values)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((actual - expected).double().pow(2).mean().sqrt() / expected.double().pow(2).mean().sqrt())
