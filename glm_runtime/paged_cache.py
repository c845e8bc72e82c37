"""A pool of blocks as typed tensor views: one per (component, layer), all over the same bytes.

Knows: how a block id and an offset become an address. Takes sizes and offsets from the `CacheLayout`, ids from its callers. Does
not know which blocks are in use. The pool is block-major, so a region's outermost stride is the whole block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.cache_layout import element_format
from kv_transfer.layout import REGION_ALIGNMENT_BYTES, CacheComponent, CacheLayout

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class CacheRegion:
    """One layer of one component in all blocks. Views; they live as long as the pool.

    blocks: [P, block_size, D], strided over the pool. rows: [U, D], overlapping: row u starts u * `unit` elements into the region,
    so that any cached row is one index into a plain 2-D tensor. Read only; stores go through `blocks`.
    """

    blocks: Tensor
    rows: Tensor
    unit: int

    @property
    def block_size_tokens(self) -> int:
        return self.blocks.shape[1]

    def addresses(self, slots: Tensor) -> Tensor:
        """Rows of `rows` for slots (block_id * block_size + offset), any shape; -1 stays -1. The same for all layers of a component."""
        size = self.block_size_tokens
        block_ids = torch.div(slots, size, rounding_mode="floor")
        elements = block_ids * self.blocks.stride(0) + (slots - block_ids * size) * self.blocks.stride(1)
        return torch.where(slots < 0, -1, torch.div(elements, self.unit, rounding_mode="floor"))

    def store(self, slots: Tensor, values: Tensor) -> None:
        """Write values [T, D] at slots [T], each rounded to the cache's dtype; no slot may be negative or occur twice."""
        size = self.block_size_tokens
        block_ids = torch.div(slots, size, rounding_mode="floor")
        self.blocks.index_put_((block_ids, slots - block_ids * size), values.to(self.blocks.dtype))


class PagedCache:
    """All regions of a pool. `num_blocks` blocks of `layout.block_bytes` at the start of `buffer`; the rest is not touched."""

    def __init__(self, layout: CacheLayout, buffer: memoryview, num_blocks: int) -> None:
        num_bytes = num_blocks * layout.block_bytes
        if len(buffer) < num_bytes:
            raise ValueError(f"PagedCache: {num_blocks} blocks of {layout.block_bytes} bytes do not fit into {len(buffer)} bytes")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size_tokens = layout.block_size_tokens
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
        components = {component.name: component for component in layout.components}
        self._regions = {
            (region.component, region.layer): self._region(flat, components[region.component], region.offset_bytes)
            for region in layout.regions
        }

    def region(self, component: str, layer: int) -> CacheRegion:
        """Views of one layer of one component. Raises KeyError if the layout has none."""
        return self._regions[component, layer]

    def _region(self, flat: Tensor, component: CacheComponent, offset_bytes: int) -> CacheRegion:
        dtype = _DTYPES[element_format(component)]
        elements = flat.view(dtype)
        width = component.bytes_per_token // dtype.itemsize
        block_stride = self.layout.block_bytes // dtype.itemsize
        offset = offset_bytes // dtype.itemsize
        blocks = elements.as_strided((self.num_blocks, self.block_size_tokens, width), (block_stride, width, 1), offset)
        unit = math.gcd(width, REGION_ALIGNMENT_BYTES // dtype.itemsize)
        num_rows = (elements.numel() - offset - width) // unit + 1
        return CacheRegion(blocks, elements.as_strided((num_rows, width), (unit, 1), offset), unit)
