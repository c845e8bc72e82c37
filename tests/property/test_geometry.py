"""Blocks scattered over the ranks of any layout come back whole through the plan of a move, and each byte crosses the wire once."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.errors import LayoutMismatch, TransferError
from kv_transfer.geometry import CacheSharding, plan_move, rank_incarnation, rank_pairs, rank_peer
from kv_transfer.identity import BlockId, Incarnation, PeerId

ME = Holder(HolderKind.REQUEST, "me")
STRANGER = Holder(HolderKind.REQUEST, "stranger")
BLOCKS_PER_HOME = 12


@st.composite
def shardings(draw: st.DrawFn) -> CacheSharding:
    """1 to 8 ranks with any number of homes that divides them."""
    num_ranks = draw(st.integers(1, 8))
    return CacheSharding(num_ranks, draw(st.sampled_from([homes for homes in range(1, num_ranks + 1) if num_ranks % homes == 0])))


class Ranks:
    """The ranks of one worker: a pool of blocks for all of them, and the bytes that each has."""

    def __init__(self, sharding: CacheSharding, rng: random.Random) -> None:
        self.sharding = sharding
        self.pool = BlockPool(BLOCKS_PER_HOME * sharding.num_homes, 4, sharding.num_homes)
        self.bytes: list[list[bytes | None]] = [[None] * BLOCKS_PER_HOME for _ in range(sharding.num_ranks)]
        taken = self.pool.allocate(rng.randrange(3 * sharding.num_homes), STRANGER)
        self.pool.release(rng.sample(taken, len(taken) // 2), STRANGER)

    def scatter(self, first_block: int, block_ids: list[BlockId], contents: list[bytes]) -> None:
        """As a step stores them: on every rank that has the block."""
        for block_id, content in zip(block_ids, contents, strict=True):
            for rank in self.sharding.ranks(block_id):
                self.bytes[rank][self.sharding.local_id(block_id)] = content

    def exchange(self, first_block: int, block_ids: list[BlockId]) -> None:
        """Ranks that have the same block copy it from the one that read it."""
        for logical_block, block_id in enumerate(block_ids, start=first_block):
            reader = self.sharding.serving_rank(logical_block)
            for rank in self.sharding.ranks(block_id):
                self.bytes[rank][self.sharding.local_id(block_id)] = self.bytes[reader][self.sharding.local_id(block_id)]


@given(shardings(), shardings(), st.integers(0, 20), st.integers(1, 9), st.integers(0, 1000))
def test_scatter_and_gather_is_identity_and_every_byte_moves_once(
    source_sharding: CacheSharding, sink_sharding: CacheSharding, first_block: int, num_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    source, sink = Ranks(source_sharding, rng), Ranks(sink_sharding, rng)
    source_ids = source.pool.allocate(num_blocks, ME, first_block)
    sink_ids = sink.pool.allocate(num_blocks, ME, first_block)
    contents = [bytes([place, seed % 251]) for place in range(num_blocks)]
    source.scatter(first_block, source_ids, contents)
    serving = [source_sharding.serving_rank(logical_block) for logical_block in range(first_block, first_block + num_blocks)]

    moved: Counter[bytes] = Counter()
    pairs = set(rank_pairs(source_sharding, sink_sharding))
    for part in plan_move(source_sharding, sink_sharding, first_block, sink_ids, source_ids, serving):
        assert (part.sink_rank, part.source_rank) in pairs, "bytes move between ranks that were never connected"
        for sink_id, source_id in zip(part.sink_ids, part.source_ids, strict=True):
            content = source.bytes[part.source_rank][source_id]
            assert content is not None, "a rank is asked for a block that it does not have"
            assert sink.bytes[part.sink_rank][sink_id] is None, "two blocks land in one place"
            sink.bytes[part.sink_rank][sink_id] = content
            moved[content] += 1
    assert moved == Counter(contents), "a block crossed the wire twice, or not at all"

    sink.exchange(first_block, sink_ids)
    for block_id, content in zip(sink_ids, contents, strict=True):
        for rank in range(sink_sharding.num_ranks):
            if sink_sharding.has(rank, block_id):
                assert sink.bytes[rank][sink_sharding.local_id(block_id)] == content
    stored = sum(content is not None for rank in sink.bytes for content in rank)
    assert stored == num_blocks * sink_sharding.num_copies, "bytes landed where no block is"


@given(shardings(), st.integers(0, 1000))
def test_an_id_has_one_home_and_one_local_id(sharding: CacheSharding, number: int) -> None:
    block_id = BlockId(number)
    home, local = sharding.home(block_id), sharding.local_id(block_id)
    assert sharding.group_id(home, local) == block_id
    assert [rank for rank in range(sharding.num_ranks) if sharding.has(rank, block_id)] == list(sharding.ranks(block_id))
    assert len(sharding.ranks(block_id)) == sharding.num_copies
    pool = BlockPool(4 * sharding.num_homes, 4, sharding.num_homes)
    (handed_out,) = pool.allocate(1, ME, number)
    assert sharding.has(sharding.serving_rank(number), handed_out), "the pool and the geometry agree on homes"


def test_the_named_layouts() -> None:
    """PROTOCOL: logical block i is on rank i % dcp_size, in that rank's own pool; rank i % pcp_size of a replicated source serves it."""
    by_block, replicated = CacheSharding.by_block(4), CacheSharding.replicated(4)
    assert [by_block.home(BlockId(number)) for number in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [by_block.local_id(BlockId(number)) for number in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [replicated.local_id(BlockId(number)) for number in range(3)] == [0, 1, 2]
    assert all(replicated.has(rank, BlockId(7)) for rank in range(4))
    assert [sharding.serving_rank(6) for sharding in (by_block, replicated, CacheSharding(4, 2))] == [2, 2, 2]
    assert (by_block.kind, replicated.kind, CacheSharding(4, 2).kind) == ("by_block", "replicated", "by_block, replicated")
    assert list(rank_pairs(CacheSharding.replicated(2), CacheSharding.by_block(4))) == [(0, 0), (1, 1), (2, 0), (3, 1)]


@pytest.mark.parametrize(("num_ranks", "num_homes"), [(0, 1), (1, 0), (2, 4), (4, 3), (-1, -1), (1 << 20, 1)])
def test_what_no_worker_can_be_is_refused(num_ranks: int, num_homes: int) -> None:
    with pytest.raises(LayoutMismatch, match="cannot lie on"):
        CacheSharding(num_ranks, num_homes)


def test_blocks_that_are_not_where_the_peer_said_are_refused() -> None:
    by_block = CacheSharding.by_block(2)
    ids = [BlockId(0), BlockId(1)]
    with pytest.raises(TransferError, match="logical block 0 was sealed in block 1"):
        plan_move(by_block, by_block, 0, ids, ids[::-1])
    with pytest.raises(TransferError, match="rank 1; by the peer's sharding rank 0"):
        plan_move(CacheSharding.replicated(2), by_block, 0, ids, ids, [1, 0])
    with pytest.raises(AssertionError, match="does not have"):
        plan_move(by_block, by_block, 1, ids, ids)


def test_ranks_have_names_of_their_own() -> None:
    peer = PeerId("decode-0@a")
    assert [rank_peer(peer, rank) for rank in range(3)] == ["decode-0@a", "decode-0@a/1", "decode-0@a/2"]
    assert len({rank_incarnation(Incarnation(0x1234567), rank) for rank in range(8)}) == 8
    assert rank_incarnation(Incarnation(5), 0) == 5
