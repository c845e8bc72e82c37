"""A worker's transport over several ranks: when a READ is DONE, what its errors mean, and what becomes of ranks that are lost."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from kv_transfer.errors import EngineFault, LayoutMismatch, PeerLost, ProtocolMismatch, TransferError
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_incarnation, rank_peer
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId, peer_id
from kv_transfer.messages import PeerOffer
from kv_transfer.pairing import PairTerms
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transfer_thread import TransferCallbacks, TransferThread
from kv_transfer.transports.base import ReadOutcome
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.loopback import CALM, FaultPlan, LoopbackFabric, LoopbackTransport
from kv_transfer.transports.ranks import LinkedRank, LocalRank, OpenPeer, StartProbe, serve_rank
from tests.conformance.transport_ends import BLOCK_BYTES, LAYOUT
from tests.probing import read_probe
from tests.rank_processes import frame_pair
from tests.unit.kv_transfer.test_link import run, until

SINK, SOURCE = peer_id("d0", Incarnation(1)), peer_id("p0", Incarnation(2))


class Side:
    """A worker with so many ranks over one fabric. num_blocks: of each rank."""

    def __init__(self, fabric: LoopbackFabric, me: PeerId, sharding: CacheSharding, num_blocks: int = 8) -> None:
        self.sharding = sharding
        self.memories = [PoolMemory(num_blocks, BLOCK_BYTES) for _ in range(sharding.num_ranks)]
        self.parts = [LoopbackTransport(fabric, rank_peer(me, rank), memory) for rank, memory in enumerate(self.memories)]
        ranks = [LocalRank(part, memory) for part, memory in zip(self.parts, self.memories, strict=True)]
        self.transport = GroupTransport(ranks, sharding)

    def offer(self, peer: PeerId) -> PeerOffer:
        terms = PairTerms.of_pool(LAYOUT, "w", self.memories[0], sharding=self.sharding)
        return terms.offer(self.transport.open_peer(peer))

    def mark(self, rank: int, local_id: int) -> None:
        """Say in the block which rank it is on."""
        self.memories[rank].block(BlockId(local_id))[:2] = bytes([1 + rank, local_id])

    def marks(self, rank: int, local_id: int) -> tuple[int, int]:
        return tuple(self.memories[rank].block(BlockId(local_id))[:2])  # type: ignore[return-value]


class Both:
    def __init__(self, source: CacheSharding, sink: CacheSharding, plan: FaultPlan = CALM) -> None:
        self.fabric = LoopbackFabric(plan)
        self.source, self.sink = Side(self.fabric, SOURCE, source), Side(self.fabric, SINK, sink)
        for rank in range(source.num_ranks):
            self.source.memories[rank].write_probe(rank_incarnation(Incarnation(2), rank))
            for local_id in range(8):
                self.source.mark(rank, local_id)

    def connect(self) -> PeerOffer:
        self.sink.transport.open_peer(SOURCE)
        offer = self.source.offer(SINK)
        self.sink.transport.connect_peer(SOURCE, offer)
        return offer

    def land(self, sink_rank: int) -> None:
        """Everything that is on its way to one rank arrives."""
        for piece in self.fabric.pieces():
            if piece.sink is self.sink.parts[sink_rank]:
                self.fabric.land(piece)


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


def test_a_read_is_done_when_every_part_is_and_each_block_came_from_the_rank_that_serves_it() -> None:
    both = Both(CacheSharding.replicated(2), CacheSharding.by_block(4))
    both.connect()
    both.sink.transport.post_read(PostRead(7, SOURCE, ids(0, 1, 2, 3, 4), ids(5, 1, 3, 2, 7), 0, (0, 1, 0, 1, 0)))
    for rank in (3, 0, 2):
        both.land(rank)
        assert both.sink.transport.poll() == [], "not all parts have ended"
    assert both.sink.transport.num_in_flight() == 1
    both.land(1)
    assert both.sink.transport.poll() == [ReadOutcome(7, SOURCE, None)]
    assert both.sink.transport.num_in_flight() == 0
    landed = {(rank, local_id): both.sink.marks(rank, local_id) for rank in range(4) for local_id in range(2)}
    assert landed == {
        (0, 0): (1, 5), (1, 0): (2, 1), (2, 0): (1, 3), (3, 0): (2, 2), (0, 1): (1, 7), (1, 1): (0, 0), (2, 1): (0, 0), (3, 1): (0, 0)
    }  # fmt: skip
    moved = both.sink.transport.bytes_moved
    assert moved == {(0, 0): 2 * BLOCK_BYTES, (1, 1): BLOCK_BYTES, (2, 0): BLOCK_BYTES, (3, 1): BLOCK_BYTES}
    assert sum(moved.values()) == 5 * BLOCK_BYTES


def test_one_part_s_error_is_the_read_s_and_is_told_once() -> None:
    both = Both(CacheSharding.replicated(2), CacheSharding.replicated(2))
    both.connect()
    both.sink.transport.post_read(PostRead(7, SOURCE, ids(0, 1), ids(0, 1), 0, (0, 1)))
    both.source.parts[1].die()
    (outcome,) = both.sink.transport.poll()
    assert (outcome.read_id, outcome.peer, type(outcome.error)) == (7, SOURCE, PeerLost)
    assert "rank 1 from rank 1" in str(outcome.error)
    assert both.sink.transport.num_in_flight() == 0
    both.land(0)
    assert both.sink.transport.poll() == [], "the part that was left has ended, which is nobody's READ any more"


def test_destroying_a_peer_ends_its_parts_on_every_rank() -> None:
    both = Both(CacheSharding.replicated(2), CacheSharding.by_block(4))
    both.connect()
    both.sink.transport.post_read(PostRead(7, SOURCE, ids(0, 1, 2, 3), ids(0, 1, 2, 3)))
    both.land(2)
    both.sink.transport.destroy_peer(SOURCE)
    assert both.fabric.pieces() == ()
    assert (both.sink.transport.num_in_flight(), both.sink.transport.poll()) == (0, [])
    assert all(part._agents == {} for part in both.sink.parts)
    both.sink.transport.post_read(PostRead(8, SOURCE, ids(0), ids(0)))
    (outcome,) = both.sink.transport.poll()
    assert isinstance(outcome.error, PeerLost)
    both.connect()
    both.sink.transport.post_read(PostRead(9, SOURCE, ids(0, 1, 2, 3), ids(0, 1, 2, 3)))
    both.fabric.advance(1.0)
    assert both.sink.transport.poll() == [ReadOutcome(9, SOURCE, None)]


def test_agents_that_a_failed_connection_left_are_destroyed_with_the_peer() -> None:
    both = Both(CacheSharding.replicated(4), ONE_RANK)
    both.sink.transport.open_peer(SOURCE)
    offer = both.source.offer(SINK)
    both.source.parts[2].die()
    with pytest.raises(PeerLost):
        both.sink.transport.connect_peer(SOURCE, offer)
    both.sink.transport.post_read(PostRead(1, SOURCE, ids(0), ids(0)))
    assert isinstance(both.sink.transport.poll()[0].error, PeerLost), "a peer is connected with all of its ranks or not at all"
    assert len(both.sink.parts[0]._agents) == 4
    both.sink.transport.destroy_peer(SOURCE)
    assert both.sink.parts[0]._agents == {}


def test_every_pair_of_ranks_is_probed_and_another_rank_s_pool_is_noticed() -> None:
    both = Both(CacheSharding.replicated(2), CacheSharding.by_block(4))
    both.fabric.step_s = 0.02
    both.connect()
    read_probe(both.sink.transport, SOURCE, Incarnation(2), 5.0)
    both.source.memories[1].write_probe(Incarnation(2))  # the pattern of rank 0
    with pytest.raises(PeerLost, match="pattern"):
        read_probe(both.sink.transport, SOURCE, Incarnation(2), 5.0)


def test_one_rank_probes_the_peer_s_ranks_one_after_the_other() -> None:
    both = Both(CacheSharding.replicated(3), ONE_RANK)
    both.connect()
    both.fabric.cut(SINK, rank_peer(SOURCE, 1))
    both.sink.transport.start_probe(SOURCE)
    answers = [both.sink.transport.is_probe_back(SOURCE, Incarnation(2)) for _ in range(4)]
    both.fabric.heal()
    answers += [both.sink.transport.is_probe_back(SOURCE, Incarnation(2)) for _ in range(2)]
    assert answers == [False, False, False, False, False, True], "rank 2 is probed when rank 1 has answered, and not before"


def test_a_seal_that_names_blocks_which_the_peer_cannot_have_fails_that_read_alone() -> None:
    both = Both(CacheSharding.by_block(2), CacheSharding.by_block(2))
    both.connect()
    for read_id, remote in ((1, ids(1, 0)), (2, ids(16, 1)), (3, ids(-2, 1))):
        both.sink.transport.post_read(PostRead(read_id, SOURCE, ids(0, 1), remote))
    both.sink.transport.post_read(PostRead(4, SOURCE, ids(0, 1), ids(0, 1), 0, (1, 0)))
    outcomes = both.sink.transport.poll()
    assert [outcome.read_id for outcome in outcomes] == [1, 2, 3, 4]
    assert all(isinstance(outcome.error, TransferError) for outcome in outcomes)


HOSTILE: dict[str, dict[str, Any]] = {
    "more ranks than it describes": {"num_ranks": 3},
    "fewer": {"num_ranks": 1},
    "no ranks": {"num_ranks": 0, "other_ranks": ()},
    "homes that do not divide": {"num_homes": 3},
    "no homes": {"num_homes": 0},
    "more homes than ranks": {"num_homes": 4},
    "a pool without blocks": {"num_blocks": 0},
    "a pool without end": {"num_blocks": 1 << 60},
    "an address that is none": {"base_address": -4096},
    "an address beyond the last": {"base_address": (1 << 64) - 4096},
    "blocks of nothing": {"block_bytes": 0},
    "a device that is none": {"device_id": -1},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_offer_that_makes_no_sense_is_refused_and_says_why(name: str) -> None:
    both = Both(CacheSharding.replicated(2), ONE_RANK)
    both.sink.transport.open_peer(SOURCE)
    offer = msgspec.structs.replace(both.source.offer(SINK), **HOSTILE[name])
    with pytest.raises(LayoutMismatch) as caught:
        both.sink.transport.connect_peer(SOURCE, offer)
    assert any(str(value) in caught.value.message for value in (offer.num_ranks, offer.num_homes, offer.num_blocks, offer.base_address))


@pytest.mark.parametrize("change", [{"num_blocks": 0}, {"num_blocks": 1 << 60}, {"base_address": -1}, {"device_id": -1}])
def test_so_is_one_with_another_rank_that_makes_none(change: dict[str, Any]) -> None:
    both = Both(CacheSharding.replicated(2), ONE_RANK)
    both.sink.transport.open_peer(SOURCE)
    offer = both.source.offer(SINK)
    other = msgspec.structs.replace(offer.other_ranks[0], **change)
    with pytest.raises(LayoutMismatch, match="rank 1 of the peer describes no pool"):
        both.sink.transport.connect_peer(SOURCE, msgspec.structs.replace(offer, other_ranks=(other,)))
    twin = msgspec.structs.replace(offer.other_ranks[0], agent_name=offer.agent_name)
    with pytest.raises(LayoutMismatch, match="the same name"):
        both.sink.transport.connect_peer(SOURCE, msgspec.structs.replace(offer, other_ranks=(twin,)))


# -- ranks at the other end of a link ----------------------------------------------------------------------------------


class FarRank:
    """A rank's loop on a thread of this process."""

    def __init__(self, fabric: LoopbackFabric, timeout_s: float = 5.0) -> None:
        self.memory = PoolMemory(8, BLOCK_BYTES)
        self.transport = LoopbackTransport(fabric, rank_peer(SINK, 1), self.memory)
        ours, self.theirs = frame_pair()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.linked = LinkedRank(1, ours, timeout_s)
        self.link = ours

    def _serve(self) -> None:
        try:
            serve_rank(self.transport, self.memory, self.theirs, 0.001)
        except Exception as error:
            self.error = error
        finally:
            self.theirs.close()

    def end(self) -> None:
        self.thread.join(5)
        assert not self.thread.is_alive()


def test_a_far_rank_does_what_a_near_one_does() -> None:
    fabric = LoopbackFabric(step_s=0.01)
    far = FarRank(fabric)
    near = PoolMemory(8, BLOCK_BYTES)
    transport = GroupTransport([LocalRank(LoopbackTransport(fabric, SINK, near), near), far.linked], CacheSharding.by_block(2))
    source = Side(fabric, SOURCE, CacheSharding.replicated(2))
    for rank in range(2):
        source.memories[rank].write_probe(rank_incarnation(Incarnation(2), rank))
        source.mark(rank, 3)
    transport.open_peer(SOURCE)
    transport.connect_peer(SOURCE, source.offer(SINK))
    read_probe(transport, SOURCE, Incarnation(2), 5.0)
    transport.post_read(PostRead(1, SOURCE, ids(0, 1), ids(3, 3), 0, (0, 1)))
    told: list[ReadOutcome] = []
    while not told:
        told = transport.poll()
    assert told == [ReadOutcome(1, SOURCE, None)]
    assert (bytes(near.block(BlockId(0))[:2]), bytes(far.memory.block(BlockId(0))[:2])) == (b"\1\3", b"\2\3")
    with pytest.raises(PeerLost, match="rank 1, StartProbe"):
        transport._ask([(1, StartProbe(PeerId("nobody@1")))])
    transport.close()
    far.end()
    assert far.error is None
    assert far.transport._agents == {}


def test_a_rank_that_is_gone_or_late_ends_the_worker() -> None:
    far = FarRank(LoopbackFabric())
    far.theirs.close()
    with pytest.raises(EngineFault, match="rank 1 of this worker have ended: it is gone"):
        far.linked.poll()
    far.linked.close()
    far.end()
    assert isinstance(far.error, PeerLost)

    ours, theirs = frame_pair()
    with pytest.raises(EngineFault, match=r"has not answered for 0\.05 s"):
        LinkedRank(1, ours, 0.05)
    theirs.close()
    with pytest.raises(EngineFault, match="is gone"):
        LinkedRank(1, ours, 0.05)
    ours.close()


def test_a_rank_that_says_what_nobody_asked_for_ends_the_worker() -> None:
    for frame, complaint in ((b"\xc1", "sends what is no answer"), (msgspec.msgpack.encode(["Done"]), "says Done unasked")):
        far = FarRank(LoopbackFabric())
        far.theirs.send(frame)
        with pytest.raises(EngineFault, match=complaint):
            far.linked.poll()
        far.linked.close()
        far.end()


def test_a_rank_ends_with_rank_0_and_with_what_is_no_command() -> None:
    far = FarRank(LoopbackFabric())
    far.linked.ask(OpenPeer(SOURCE))
    far.linked.answer()
    far.link.close()
    far.end()
    assert isinstance(far.error, PeerLost)
    assert far.transport._agents == {}, "its agents go with it"
    far = FarRank(LoopbackFabric())
    far.link.send(b"\xc1")
    far.end()
    far.link.close()
    assert isinstance(far.error, ProtocolMismatch)


def test_a_lost_rank_reaches_the_loop_though_nobody_waits_for_it() -> None:
    async def test() -> None:
        caught: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: caught.append(context.get("exception")))
        fabric = LoopbackFabric()
        far = FarRank(fabric)
        near = PoolMemory(8, BLOCK_BYTES)
        group = GroupTransport([LocalRank(LoopbackTransport(fabric, SINK, near), near), far.linked], CacheSharding.by_block(2))
        callbacks = TransferCallbacks(on_done=print, on_failed=print, on_destroyed=print)
        thread = TransferThread(group, loop, callbacks, 0.001)
        far.theirs.close()
        thread.destroy(SOURCE)
        calling = asyncio.ensure_future(thread.call(lambda transport: transport.open_peer(SOURCE)))
        await until(lambda: caught)
        assert isinstance(caught[0], EngineFault)
        calling.cancel()
        await thread.close()
        far.link.close()
        far.end()

    run(test)


def test_ranks_with_blocks_of_other_sizes_are_no_worker() -> None:
    fabric = LoopbackFabric()
    memories = [PoolMemory(8, size) for size in (64, 128)]
    ranks = [LocalRank(LoopbackTransport(fabric, rank_peer(SINK, rank), memory), memory) for rank, memory in enumerate(memories)]
    with pytest.raises(EngineFault, match=r"blocks of \[64, 128\] bytes"):
        GroupTransport(ranks, CacheSharding.by_block(2))
    with pytest.raises(EngineFault, match="no worker of 3 ranks"):
        GroupTransport(ranks, CacheSharding.by_block(3))
