"""Views over the pool: every region's bytes are its own, and rows are found by address in every layer."""

import pytest
import torch
from torch import Tensor

from glm_runtime.cache_layout import INDEX_K, MLA_KV
from glm_runtime.ops.cache_rows import decode_rows, store_rows
from glm_runtime.paged_cache import CacheRegion, PagedCache
from kv_transfer.pool_memory import PoolMemory
from tests.unit.glm_runtime.test_cache_layout import ALL_FORMATS, tiny_layout


def as_bytes(plane: Tensor) -> Tensor:
    """[P, block_size, W] bytes of a strided plane, as a copy."""
    return plane.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_regions_are_the_layouts_byte_ranges(name: str) -> None:
    layout = tiny_layout(name)
    memory = PoolMemory(3, layout.block_bytes)
    cache = PagedCache(layout, memory.buffer, 3)
    raw = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    for number, region in enumerate(layout.regions):
        start = layout.block_bytes + region.offset_bytes
        raw[start : start + region.num_bytes] = number + 1
        planes = cache.region(region.component, region.layer).planes
        assert sum(plane[1].numel() * plane.itemsize for plane in planes) == region.num_bytes
    for number, region in enumerate(layout.regions):
        for plane in cache.region(region.component, region.layer).planes:
            assert (as_bytes(plane)[1] == number + 1).all()
            assert not as_bytes(plane)[0].any()
            assert not as_bytes(plane)[2].any()


@pytest.mark.parametrize("name", ALL_FORMATS)
@pytest.mark.parametrize("component", [MLA_KV, INDEX_K])
def test_a_store_writes_its_own_bytes_only(component: str, name: str) -> None:
    layout = tiny_layout(name)
    memory = PoolMemory(3, layout.block_bytes)
    raw = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    raw[:] = 0xFF
    region = PagedCache(layout, memory.buffer, 3).region(component, 1)
    store_rows(region, torch.tensor([64, -1, 127]), torch.zeros(3, region.row_format.width))
    written = (raw != 0xFF).nonzero().flatten()
    place = layout.block_bytes + layout.region(component, 1).offset_bytes
    expected = [
        place + offset + token * size + byte
        for size, offset in zip(region.row_format.plane_bytes, region.row_format.plane_offsets(64), strict=True)
        for token in (0, 63)
        for byte in range(size)
    ]
    assert written.tolist() == sorted(expected)


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_an_address_names_the_same_slot_in_every_layer(name: str) -> None:
    layout = tiny_layout(name)
    memory = PoolMemory(4, layout.block_bytes)
    cache = PagedCache(layout, memory.buffer, 4)
    slots = torch.tensor([0, 63, 64, 255, -1])
    addresses = cache.region(MLA_KV, 0).addresses(slots)
    assert addresses[4] == -1
    for layer in (0, 1, 6):
        region = cache.region(MLA_KV, layer)
        store_rows(region, slots[:4], torch.full((4, 576), 6.0 * 2**layer))
        assert torch.equal(region.addresses(slots), addresses)
        assert (read(region, addresses[:4]) == 6.0 * 2**layer).all(), "a number that every format holds exactly"


def read(region: CacheRegion, addresses: Tensor) -> Tensor:
    return decode_rows((region.rows[addresses],), region.row_format)[0]


def test_refuses_a_buffer_that_is_too_small() -> None:
    layout = tiny_layout("bf16")
    with pytest.raises(ValueError, match="do not fit"):
        PagedCache(layout, memoryview(bytearray(layout.block_bytes)), 2)
