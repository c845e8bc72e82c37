"""A pool of blocks as typed tensor views: the planes of each (component, layer), all over the same bytes.

Knows: how a block id and an offset become an address. Takes sizes and offsets from the `CacheLayout`, ids from its callers. Does
not know which blocks are in use, nor what numbers the bytes stand for (`ops/cache_rows`). The pool is block-major, so a region's
outermost stride is the whole block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from glm_runtime.row_format import RowFormat, RowKind, row_format_of
from kv_transfer.layout import REGION_ALIGNMENT_BYTES, CacheComponent, CacheLayout

_DTYPES = {RowKind.BF16: torch.bfloat16, RowKind.FP32: torch.float32}
"""Other kinds are bytes."""


@dataclass(frozen=True)
class CacheRegion:
    """One layer of one component in all blocks. Views; they live as long as the pool.

    row_format: what a row is. planes: [P, block_size, W] each, strided over the pool, of the format's dtype or bytes; most formats have
    one. rows: [U, W], overlapping, of the first plane: row u starts u * `unit` elements into the region, so that any cached row is one
    index into a plain 2-D tensor. Read only; stores go through `put`.
    """

    row_format: RowFormat
    planes: tuple[Tensor, ...]
    rows: Tensor
    unit: int

    @property
    def block_size_tokens(self) -> int:
        return self.planes[0].shape[1]

    @cached_property
    def plane_strides(self) -> tuple[int, ...]:
        """For kernels: address, bytes a block and bytes a token of the first plane, then of the last (of the scales, where there are)."""
        return strides_in_bytes(self.planes)

    def addresses(self, slots: Tensor) -> Tensor:
        """Rows of `rows` for slots (block_id * block_size + offset), any shape; -1 stays -1. The same for all layers of a component."""
        size, blocks = self.block_size_tokens, self.planes[0]
        block_ids = torch.div(slots, size, rounding_mode="floor")
        elements = block_ids * blocks.stride(0) + (slots - block_ids * size) * blocks.stride(1)
        return torch.where(slots < 0, -1, torch.div(elements, self.unit, rounding_mode="floor"))

    def put(self, slots: Tensor, stored: Sequence[Tensor]) -> None:
        """Write rows as they are, one [T, W] per plane, at slots [T]; no slot may be negative or occur twice."""
        size = self.block_size_tokens
        block_ids = torch.div(slots, size, rounding_mode="floor")
        offsets = slots - block_ids * size
        for plane, rows in zip(self.planes, stored, strict=True):
            plane.index_put_((block_ids, offsets), rows)


def strides_in_bytes(planes: Sequence[Tensor]) -> tuple[int, ...]:
    """As `CacheRegion.plane_strides`, of any planes [P, block_size, W]."""
    strides = []
    for plane in (planes[0], planes[-1]):
        size = plane.element_size()
        strides += [plane.data_ptr(), plane.stride(0) * size, plane.stride(1) * size]
    return tuple(strides)


class PagedCache:
    """All regions of a pool. `num_blocks` blocks of `layout.block_bytes` at the start of `buffer`; the rest is not touched.

    blocks: [num_blocks, block_bytes] uint8, the same bytes as they are.
    """

    def __init__(self, layout: CacheLayout, buffer: memoryview, num_blocks: int) -> None:
        num_bytes = num_blocks * layout.block_bytes
        if len(buffer) < num_bytes:
            raise ValueError(f"PagedCache: {num_blocks} blocks of {layout.block_bytes} bytes do not fit into {len(buffer)} bytes")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size_tokens = layout.block_size_tokens
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
        self.blocks = flat.view(num_blocks, layout.block_bytes)
        components = {component.name: component for component in layout.components}
        self._regions = {
            (region.component, region.layer): self._region(flat, components[region.component], region.offset_bytes)
            for region in layout.regions
        }

    def region(self, component: str, layer: int) -> CacheRegion:
        """Views of one layer of one component. Raises KeyError if the layout has none."""
        return self._regions[component, layer]

    def _region(self, flat: Tensor, component: CacheComponent, offset_bytes: int) -> CacheRegion:
        row_format = row_format_of(component)
        elements = flat.view(_DTYPES.get(row_format.kind, torch.uint8))
        planes = tuple(
            self._plane(elements, size, offset_bytes + plane_offset)
            for size, plane_offset in zip(row_format.plane_bytes, row_format.plane_offsets(self.block_size_tokens), strict=True)
        )
        first = planes[0]
        width, offset = first.shape[2], first.storage_offset()
        unit = math.gcd(width, REGION_ALIGNMENT_BYTES // elements.itemsize)
        num_rows = (elements.numel() - offset - width) // unit + 1
        return CacheRegion(row_format, planes, elements.as_strided((num_rows, width), (unit, 1), offset), unit)

    def _plane(self, elements: Tensor, bytes_per_token: int, offset_bytes: int) -> Tensor:
        width = bytes_per_token // elements.itemsize
        block_stride = self.layout.block_bytes // elements.itemsize
        shape = (self.num_blocks, self.block_size_tokens, width)
        return elements.as_strided(shape, (block_stride, width, 1), offset_bytes // elements.itemsize)
