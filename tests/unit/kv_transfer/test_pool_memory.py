"""The mapping of a pool, its probe blocks, and addresses."""

import ctypes

import pytest

from kv_transfer.geometry import ONE_RANK, CacheSharding, Place, PoolGeometry, locate
from kv_transfer.identity import BlockId, Incarnation
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.pool_memory import HUGE_PAGE_BYTES, PoolMemory, probe_pattern


def test_a_pool_is_aligned_zero_and_has_two_blocks_more() -> None:
    memory = PoolMemory(3, 4096)
    assert memory.base_address % HUGE_PAGE_BYTES == 0
    assert len(memory.buffer) == 5 * 4096
    assert not any(memory.buffer)
    assert (memory.probe_block, memory.landing_block) == (3, 4)


def test_blocks_are_where_their_addresses_say() -> None:
    memory = PoolMemory(3, 4096)
    geometry = PoolGeometry(base_address=memory.base_address, block_bytes=4096, num_blocks=3)
    memory.block(BlockId(2))[:4] = b"here"
    address, length, device = geometry.descriptor(BlockId(2))
    assert ctypes.string_at(address, 4) == b"here"
    assert (length, device) == (4096, 0)
    assert geometry.descriptors()[geometry.probe_block][0] == memory.base_address + 3 * 4096
    assert len(geometry.descriptors()) == 5


def test_the_mapping_outlives_its_object() -> None:
    memory = PoolMemory(1, 4096)
    memory.block(BlockId(0))[:4] = b"kept"
    address = memory.base_address
    del memory
    assert ctypes.string_at(address, 4) == b"kept"


def test_the_probe_pattern_tells_starts_apart() -> None:
    memory = PoolMemory(1, 100)
    memory.write_probe(Incarnation(7))
    assert bytes(memory.block(memory.probe_block)) == probe_pattern(Incarnation(7), 100) != probe_pattern(Incarnation(8), 100)
    assert not any(memory.block(BlockId(0)))
    assert not any(memory.block(memory.landing_block))


@pytest.mark.parametrize("block_id", [-1, 5])
def test_a_block_outside_the_pool_is_refused(block_id: int) -> None:
    with pytest.raises(ValueError, match="not in a pool"):
        PoolMemory(3, 64).block(BlockId(block_id))
    with pytest.raises(ValueError, match="not in a pool"):
        PoolGeometry(base_address=0, block_bytes=64, num_blocks=3).descriptor(BlockId(block_id))


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 64), (1, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="a pool needs blocks"):
        PoolMemory(num_blocks, block_bytes)


def test_a_token_of_a_layer_has_one_place() -> None:
    layout = CacheLayout(4, (CacheComponent("mla", (0, 1), 16, "x"), CacheComponent("index", (1,), 32, "y")), "m", "t")
    place = locate(layout, ONE_RANK, [BlockId(9), BlockId(5)], 6, "index", 1)
    assert (place.rank, place.block_id, place.offset_bytes, place.num_bytes) == (0, 5, 128, 128)
    assert ONE_RANK.serving_rank(3) == 0
    with pytest.raises(KeyError):
        locate(layout, ONE_RANK, [BlockId(9)], 0, "index", 0)


def test_a_rank_finds_a_token_at_home_or_where_it_is_served() -> None:
    layout = CacheLayout(4, (CacheComponent("mla", (0,), 16, "x"),), "m", "t")
    table = [BlockId(8), BlockId(5)]
    by_block, replicated = CacheSharding.by_block(2), CacheSharding.replicated(2)
    assert [locate(layout, by_block, table, 6, "mla", 0, rank) for rank in (0, 1)] == [Place(1, BlockId(2), 0, 64)] * 2
    assert [locate(layout, replicated, table, 6, "mla", 0, rank).rank for rank in (0, 1)] == [0, 1]
    in_pairs = CacheSharding(4, 2)
    assert [locate(layout, in_pairs, table, 6, "mla", 0, rank).rank for rank in range(4)] == [1, 1, 1, 3]
