"""The block pool: holders, generations, states, prefix index, eviction, audit."""

import pytest

from kv_transfer.block_pool import CACHE, BlockPool, Holder, HolderKind
from kv_transfer.errors import PoolExhausted
from kv_transfer.handoff import BlockEvent, BlockState, IllegalTransition
from kv_transfer.identity import BlockId

ME = Holder(HolderKind.REQUEST, "me")
YOU = Holder(HolderKind.REQUEST, "you")
STEP = Holder(HolderKind.STEP, 1)
KEYS = [bytes([index]) * 16 for index in range(8)]


def cached_pool(num_blocks: int = 4, num_cached: int = 2) -> BlockPool:
    pool = BlockPool(num_blocks, 64)
    ids = pool.allocate(num_cached, ME)
    for block_id, key in zip(ids, KEYS, strict=False):
        pool.publish(block_id, key)
    pool.release(ids, ME)
    return pool


def test_a_block_is_free_when_its_last_holder_goes_and_not_before() -> None:
    pool = BlockPool(2, 64)
    ids = pool.allocate(2, ME)
    pool.hold(ids, STEP)
    pool.release_all(ME)
    assert (pool.num_free, pool.num_held) == (0, 2)
    with pytest.raises(PoolExhausted):
        pool.allocate(1, YOU)
    pool.release(ids, STEP)
    assert pool.num_free == 2
    assert pool.audit().is_quiesced


def test_holding_and_releasing_twice_is_harmless() -> None:
    pool = BlockPool(2, 64)
    ids = pool.allocate(1, ME)
    pool.hold(ids, ME)
    pool.release(ids, ME)
    pool.release(ids, ME)
    pool.release_all(ME)
    assert pool.num_free == 2
    pool.audit()


def test_the_generation_moves_before_a_block_is_handed_out_again() -> None:
    pool = BlockPool(1, 64)
    (block_id,) = pool.allocate(1, ME)
    first = pool.generation(block_id)
    pool.release([block_id], ME)
    assert pool.generation(block_id) == first
    pool.allocate(1, YOU)
    assert pool.generation(block_id) == first + 1


def test_a_free_block_cannot_be_held() -> None:
    with pytest.raises(AssertionError, match="is free"):
        BlockPool(1, 64).hold([BlockId(0)], ME)


def test_allocation_is_all_or_nothing() -> None:
    pool = cached_pool(4, 2)
    with pytest.raises(PoolExhausted, match="5 blocks are needed and 4 of 4 are available"):
        pool.allocate(5, ME)
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.audit()


def test_lookup_finds_the_longest_prefix_and_changes_nothing() -> None:
    pool = cached_pool(4, 3)
    assert pool.lookup(KEYS) == [0, 1, 2]
    assert pool.lookup(KEYS[:2]) == [0, 1]
    assert pool.lookup(KEYS[1:]) == [1, 2]
    assert pool.lookup([b"?" * 16, *KEYS]) == []
    assert pool.num_cached == 3


def test_pinned_blocks_are_not_evicted() -> None:
    pool = cached_pool(3, 2)
    pinned = pool.pin(KEYS[:1], YOU)
    assert pool.num_available == 2
    assert set(pool.allocate(2, ME)).isdisjoint(pinned)
    assert pool.lookup(KEYS) == pinned
    pool.audit()


def test_eviction_takes_the_tail_of_the_least_recently_used_prompt() -> None:
    pool = cached_pool(4, 3)
    pool.pin(KEYS[:1], YOU)
    pool.release_all(YOU)
    pool.allocate(2, ME)
    assert pool.lookup(KEYS) == [0, 1]
    pool.allocate(1, ME)
    assert pool.lookup(KEYS) == [0]


def test_an_evicted_block_is_in_no_index_and_has_a_new_generation() -> None:
    pool = cached_pool(1, 1)
    before = pool.generation(BlockId(0))
    pool.allocate(1, ME)
    assert pool.lookup(KEYS) == []
    assert pool.generation(BlockId(0)) == before + 1
    assert pool.holders(BlockId(0)) == {ME}
    pool.audit()


def test_the_first_publisher_of_a_key_wins() -> None:
    pool = BlockPool(2, 64)
    first, second = pool.allocate(2, ME)
    assert pool.publish(first, KEYS[0])
    assert pool.publish(first, KEYS[0])
    assert not pool.publish(second, KEYS[0])
    pool.release_all(ME)
    assert (pool.lookup(KEYS), pool.num_free, pool.num_cached) == ([first], 1, 1)
    pool.audit()


def test_a_published_block_keeps_its_key() -> None:
    pool = BlockPool(1, 64)
    (block_id,) = pool.allocate(1, ME)
    pool.publish(block_id, KEYS[0])
    with pytest.raises(AssertionError, match="another key"):
        pool.publish(block_id, KEYS[1])


@pytest.mark.parametrize("events", [["READ_POSTED"], ["READ_POSTED", "READ_DONE"], ["READ_POSTED", "READ_ENDED"]])
def test_bytes_that_are_not_committed_are_never_indexed(events: list[str]) -> None:
    pool = BlockPool(1, 64)
    ids = pool.allocate(1, ME)
    for event in events:
        pool.advance(ids, BlockEvent[event])
    with pytest.raises(AssertionError, match="not committed"):
        pool.publish(ids[0], KEYS[0])


def test_a_block_being_read_cannot_become_free() -> None:
    pool = BlockPool(1, 64)
    ids = pool.allocate(1, ME)
    pool.advance(ids, BlockEvent.READ_POSTED)
    with pytest.raises(IllegalTransition):
        pool.release(ids, ME)


def test_quarantined_blocks_are_counted_apart_and_stay_out() -> None:
    pool = BlockPool(2, 64)
    ids = pool.allocate(1, ME)
    for event in (BlockEvent.READ_POSTED, BlockEvent.READ_ENDED, BlockEvent.QUARANTINED):
        pool.advance(ids, event)
    pool.hold(ids, Holder(HolderKind.QUARANTINE, "peer"))
    pool.release_all(ME)
    audit = pool.audit()
    assert (audit.num_free, audit.num_held, audit.num_quarantined) == (1, 0, 1)
    assert audit.is_quiesced
    assert audit.holders["quarantine"] == 1
    with pytest.raises(PoolExhausted):
        pool.allocate(2, YOU)


def test_the_cache_holder_cannot_be_set_or_taken_by_hand() -> None:
    pool = cached_pool()
    with pytest.raises(AssertionError):
        pool.hold([BlockId(0)], CACHE)
    with pytest.raises(AssertionError):
        pool.release([BlockId(0)], CACHE)


def test_states_of_blocks() -> None:
    pool = cached_pool(2, 1)
    assert pool.state(BlockId(0)) is BlockState.COMMITTED
    assert pool.state(BlockId(1)) is BlockState.FREE
    assert pool.held_by(CACHE) == (0,)


def test_an_audit_notices_a_lost_block() -> None:
    pool = BlockPool(2, 64)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.audit()


def test_what_is_promised_is_nobody_else_s_and_too_much_is_not_promised() -> None:
    pool = BlockPool(4, 8)
    pool.promise(3)
    assert (pool.num_available, pool.num_unpromised) == (4, 1)
    with pytest.raises(PoolExhausted, match="promised"):
        pool.promise(2)
    assert pool.num_promised == 3
    pool.promise(-3)
    assert pool.num_unpromised == 4
    with pytest.raises(AssertionError):
        pool.promise(-1)


def test_a_pin_may_not_take_what_is_promised_even_where_nothing_else_is_wanted_of_its_home() -> None:
    pool = BlockPool(4, 64, num_homes=2)
    (cached,) = pool.allocate(1, ME)
    pool.publish(cached, KEYS[0])
    pool.release_all(ME)
    pool.promise(3, 0)  # both blocks of home 0, one of home 1
    pinned = pool.pin(KEYS[:1], YOU)
    with pytest.raises(PoolExhausted):
        pool.promise(1, 1)
    pool.release(pinned, YOU)
    pool.promise(1, 1)
    assert pool.unpromised_by_home() == (0, 0)


def test_blocks_are_counted_on_the_fullest_home() -> None:
    pool = BlockPool(6, 64, num_homes=2)
    ids = pool.allocate(3, ME)
    assert [block_id % 2 for block_id in ids] == [0, 1, 0]
    assert (pool.num_free, pool.num_available, pool.available_by_home()) == (3, 2, (1, 2))
    with pytest.raises(PoolExhausted, match="3 blocks are needed and 2 of 6 are available"):
        pool.allocate(3, ME, first_block=4)
    assert pool.allocate(3, ME, first_block=3) == [3, 4, 5]
    pool.audit()
