"""Views over the pool: every region's bytes are its own, and rows are found by address in every layer."""

import pytest
import torch

from glm_runtime.cache_layout import INDEX_K, MLA_KV, make_cache_layout
from glm_runtime.config import GlmConfig
from glm_runtime.paged_cache import PagedCache
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY


@pytest.mark.parametrize("cache_format", ["bf16", "fp32"])
def test_regions_are_the_layouts_byte_ranges(cache_format: str) -> None:
    layout = make_cache_layout(GlmConfig.from_checkpoint(TINY), cache_format, "m", "t")
    memory = PoolMemory(3, layout.block_bytes)
    cache = PagedCache(layout, memory.buffer, 3)
    for number, region in enumerate(layout.regions):
        cache.region(region.component, region.layer).blocks[1].fill_(number + 1.0)
    raw = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    dtype = torch.bfloat16 if cache_format == "bf16" else torch.float32
    for number, region in enumerate(layout.regions):
        start = layout.block_bytes + region.offset_bytes
        assert (raw[start : start + region.num_bytes].view(dtype) == number + 1.0).all()
    assert not raw[: layout.block_bytes].any()
    assert not raw[2 * layout.block_bytes :].any(), "neither other blocks nor the probe blocks are touched"


@pytest.mark.parametrize("component", [MLA_KV, INDEX_K])
def test_an_address_names_the_same_slot_in_every_layer(component: str) -> None:
    config = GlmConfig.from_checkpoint(TINY)
    layout = make_cache_layout(config, "bf16", "m", "t")
    memory = PoolMemory(4, layout.block_bytes)
    cache = PagedCache(layout, memory.buffer, 4)
    slots = torch.tensor([0, 63, 64, 255, -1])
    for layer in (0, 1, 6):
        region = cache.region(component, layer)
        values = torch.full((4, region.blocks.shape[2]), layer + 1.0)
        region.store(slots[:4], values)
        addresses = region.addresses(slots)
        assert addresses[4] == -1
        assert torch.equal(region.rows[addresses[:4]].float(), values)


def test_refuses_a_buffer_that_is_too_small() -> None:
    layout = make_cache_layout(GlmConfig.from_checkpoint(TINY), "bf16", "m", "t")
    with pytest.raises(ValueError, match="do not fit"):
        PagedCache(layout, memoryview(bytearray(layout.block_bytes)), 2)
