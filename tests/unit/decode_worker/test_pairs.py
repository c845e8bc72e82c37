"""Pairs over the loopback transport: made, refused, broken and healed. One event loop, no sockets."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from decode_worker.pairs import PrefillPairs
from decode_worker.reads import Reads
from glm_runtime.engine.worker_config import WorkerNetwork
from kv_transfer.config import ProtocolTimers, WireConfig
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_incarnation, rank_peer
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId, WorkerId
from kv_transfer.link import Party
from kv_transfer.messages import (
    Message,
    PairHello,
    PairRefused,
    PartyKind,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
    WorkerTable,
)
from kv_transfer.pairing import PairTerms
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transfer_thread import TransferCallbacks, TransferThread
from kv_transfer.transports.base import AgentDescription
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from kv_transfer.transports.ranks import LocalRank
from prefill_worker.pairs import DecodePairs
from tests.fakes.toy_model import TOY_LAYOUT

SOURCE = Party(PartyKind.PREFILL, "p0", Incarnation(11))
SINK = Party(PartyKind.DECODE, "d0", Incarnation(22))
NETWORK = WorkerNetwork(wire=WireConfig(redial_min_s=0.01, redial_max_s=0.02), timers=ProtocolTimers(repeat_s=0.05, read_suspect_s=0.5))


class Side:
    """One worker's end: memory, transport, transfer thread, and an outside that hands messages to the other end."""

    def __init__(self, me: Party, fabric: LoopbackFabric, sharding: CacheSharding = ONE_RANK) -> None:
        self.me = me
        self.memories = [PoolMemory(4, TOY_LAYOUT.block_bytes) for _ in range(sharding.num_ranks)]
        for rank, memory in enumerate(self.memories):
            memory.write_probe(rank_incarnation(me.incarnation, rank))
        self.memory = self.memories[0]
        parts = [LoopbackTransport(fabric, rank_peer(me.peer_id, rank), memory) for rank, memory in enumerate(self.memories)]
        self.transport = GroupTransport([LocalRank(part, part.memory) for part in parts], sharding)
        callbacks = TransferCallbacks(
            on_done=lambda _id: None, on_failed=lambda _id, _error: None, on_destroyed=lambda peer: self.destroyed.append(peer)
        )
        self.destroyed: list[PeerId] = []
        self.transfers = TransferThread(self.transport, asyncio.get_running_loop(), callbacks, 0.001)
        self.terms = PairTerms.of_pool(TOY_LAYOUT, "weights", self.memory, sharding=sharding)
        self.sent: list[Message] = []
        self.kept: list[WorkerAddress] = []
        self.forgotten: list[WorkerId] = []
        self.faults: list[BaseException] = []
        self.reports = 0
        self.drains = 0
        self.deliver: Callable[[Party, Any], None] = lambda _party, _message: None

    def send(self, _peer: PeerId, message: Message) -> None:
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self.deliver, self.me, message)

    def keep(self, address: WorkerAddress) -> None:
        self.kept.append(address)

    def forget(self, worker_id: WorkerId) -> None:
        self.forgotten.append(worker_id)

    def wake(self) -> None: ...

    def report(self) -> None:
        self.reports += 1

    def drain(self) -> None:
        self.drains += 1

    def fault(self, error: BaseException) -> None:
        self.faults.append(error)


class Both:
    """Two sides and their pairs."""

    def __init__(self, shardings: tuple[CacheSharding, CacheSharding] = (ONE_RANK, ONE_RANK), **source_terms: Any) -> None:
        self.fabric = LoopbackFabric(step_s=0.01)
        self.source, self.sink = Side(SOURCE, self.fabric, shardings[0]), Side(SINK, self.fabric, shardings[1])
        self.decode_pairs = DecodePairs(replace(self.source.terms, **source_terms), self.source.transfers, self.source)
        self.reads = Reads(self.sink.transfers, self.sink.memory.block_bytes)
        self.prefill_pairs = PrefillPairs(self.sink.terms, self.sink.transfers, self.reads, self.sink, NETWORK, random.Random(0))
        self.sink.deliver = self.decode_pairs.receive
        self.source.deliver = self.prefill_pairs.receive

    @property
    def is_up(self) -> bool:
        return [state.up for state in self.prefill_pairs.states()] == [True]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for is the code's own doing
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        await self.prefill_pairs.close()
        await self.sink.transfers.close()
        await self.source.transfers.close()
        assert self.sink.faults == self.source.faults == []


def run(script: Callable[[Both], Awaitable[None]], **source_terms: Any) -> None:
    async def main() -> None:
        both = Both(**source_terms)
        await script(both)
        await both.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("theirs", "ours", "warns"),
    [
        (("deterministic", "torch"), ("deterministic", "native"), True),
        (("deterministic", "native"), ("deterministic", "native"), False),
        (("fast", "torch"), ("fast", "native"), False),
        (("", ""), ("deterministic", "native"), False),  # of a release that does not say
    ],
)
def test_deterministic_workers_with_other_kernels_pair_with_a_warning(
    theirs: tuple[str, str], ours: tuple[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs._terms = replace(both.sink.terms, numerics=ours[0], kernels=ours[1])
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: both.is_up)

    with caplog.at_level(logging.WARNING):
        run(script, numerics=theirs[0], kernels=theirs[1])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warns, told
    for message in told:
        assert "kernels are native here and torch at the peer" in message
        assert "set runtime.kernels" in message


@pytest.mark.parametrize(
    "shardings",
    [
        (CacheSharding.replicated(2), CacheSharding.by_block(4)),
        (CacheSharding.by_block(4), ONE_RANK),
        (ONE_RANK, CacheSharding.replicated(3)),
    ],
    ids=lambda pair: " to ".join(f"{sharding.num_ranks} {sharding.kind}" for sharding in pair),
)
def test_workers_whose_ranks_are_cut_differently_pair(shardings: tuple[CacheSharding, CacheSharding]) -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: both.is_up)
        (hello,) = [message for message in both.source.sent if isinstance(message, PairHello)]
        assert (hello.offer.num_ranks, hello.offer.num_homes) == (shardings[0].num_ranks, shardings[0].num_homes)
        pools = [hello.offer.base_address, *(other.base_address for other in hello.offer.other_ranks)]
        assert pools == [memory.base_address for memory in both.source.memories]
        both.prefill_pairs.destroy(SOURCE.peer_id)
        await both.until(lambda: not both.is_up)
        await both.until(lambda: both.is_up)

    run(script, shardings=shardings)


def test_an_offer_that_makes_no_sense_is_refused_on_either_side(caplog: pytest.LogCaptureFixture) -> None:
    async def at_the_source(both: Both) -> None:
        offer = both.sink.terms.offer(AgentDescription("odd", 1, b""))
        both.decode_pairs.receive(SINK, PairHello(msgspec.structs.replace(offer, num_ranks=7)))
        (refusal,) = both.source.sent
        assert isinstance(refusal, PairRefused)
        assert "the peer has 7 ranks and describes 1" in refusal.reason

    async def at_the_sink(both: Both) -> None:
        deliver = both.prefill_pairs.receive

        def odd(party: Party, message: Any) -> None:
            deliver(party, PairHello(msgspec.structs.replace(message.offer, num_homes=5)))

        both.source.deliver = odd
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: "blocks with 5 homes cannot lie on 1 ranks" in caplog.text)
        assert not both.is_up

    run(at_the_source)
    run(at_the_sink)


def epochs(sent: list[Message]) -> list[int]:
    return [message.offer.agent_epoch for message in sent if isinstance(message, PairHello)]


def test_a_pair_is_up_after_its_probe() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        assert not both.is_up
        await both.until(lambda: both.is_up)
        assert both.sink.reports >= 1
        assert both.decode_pairs.num_pairs == 1

    run(script)


def test_another_checkpoint_is_refused_once_and_not_asked_again() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: any(isinstance(message, PairRefused) for message in both.source.sent))
        await asyncio.sleep(0.1)
        assert not both.is_up
        assert len(both.sink.sent) == 1
        refusal = both.source.sent[0]
        assert isinstance(refusal, PairRefused)
        assert "weights version" in refusal.reason

    run(script, weights_version="others")


def test_another_layout_is_refused() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: any(isinstance(message, PairRefused) for message in both.source.sent))
        assert not both.is_up

    run(script, layout=msgspec.structs.replace(TOY_LAYOUT, model_digest="others"))


def test_a_destroyed_agent_is_made_anew_under_the_next_epoch() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: both.is_up)
        both.prefill_pairs.destroy(SOURCE.peer_id)
        await both.until(lambda: not both.is_up)
        await both.until(lambda: both.is_up)
        assert epochs(both.sink.sent) == [1, 2]
        assert epochs(both.source.sent) == [1, 2]
        assert SOURCE.peer_id in both.sink.destroyed

    run(script)


def test_a_cut_path_is_not_up_and_heals() -> None:
    async def script(both: Both) -> None:
        both.fabric.cut(SINK.peer_id, SOURCE.peer_id)
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: len(epochs(both.sink.sent)) >= 3)
        assert not both.is_up
        both.fabric.heal()
        await both.until(lambda: both.is_up)

    run(script)


def test_a_lost_answer_is_asked_for_again_under_the_same_epoch() -> None:
    async def script(both: Both) -> None:
        deliver, both.source.deliver = both.source.deliver, lambda _party, _message: None
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: bool(both.source.sent))
        both.source.deliver = deliver
        await both.until(lambda: both.is_up)
        assert epochs(both.sink.sent) == [1, 1]
        assert epochs(both.source.sent) == [1, 1]

    run(script)


def test_a_lost_peer_takes_its_agents_with_it() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: both.is_up)
        both.prefill_pairs.peer_lost(SOURCE)
        both.decode_pairs.peer_lost(SINK)
        assert both.prefill_pairs.states() == ()
        assert both.decode_pairs.num_pairs == 0
        await both.until(lambda: both.sink.destroyed == [SOURCE.peer_id] and both.source.destroyed == [SINK.peer_id])

    run(script)


def test_a_suspect_pair_is_down_until_a_read_ends() -> None:
    async def script(both: Both) -> None:
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: both.is_up)
        both.prefill_pairs.suspect(SOURCE.peer_id)
        assert not both.is_up
        both.prefill_pairs.trust(SOURCE.peer_id)
        assert both.is_up

    run(script)


def test_reads_are_measured_per_peer() -> None:
    async def script(both: Both) -> None:
        read = PostRead(1, SOURCE.peer_id, (BlockId(0), BlockId(1)), (BlockId(2), BlockId(3)))
        both.reads.post(read, 10.0)
        assert both.reads.num_in_flight == 1
        assert both.reads.done(1, 10.5) == SOURCE.peer_id
        assert both.reads.done(1, 11.0) is None
        assert both.reads.bytes_read == 2 * TOY_LAYOUT.block_bytes
        assert both.reads.bytes_per_s(SOURCE.peer_id) == 4 * TOY_LAYOUT.block_bytes

    run(script)


def entry(name: str, incarnation: int, state: WorkerState) -> WorkerEntry:
    address = WorkerAddress(WorkerId(name), Incarnation(incarnation), "host", 1)
    return WorkerEntry(address, "prefill", state, "f", 1, WorkerLoad())


def test_every_prefill_worker_that_serves_is_dialled_and_no_other() -> None:
    async def script(both: Both) -> None:
        first = WorkerTable(1, (entry("a", 1, WorkerState.SERVING), entry("b", 2, WorkerState.STARTING)))
        second = WorkerTable(2, (entry("a", 1, WorkerState.GONE), entry("b", 2, WorkerState.WARM)))
        third = WorkerTable(3, (entry("b", 3, WorkerState.SERVING),))
        for table in (first, first, second, third):
            both.prefill_pairs.table_changed(table)
        assert [(address.worker_id, address.incarnation) for address in both.sink.kept] == [("a", 1), ("b", 2), ("b", 3)]
        assert both.sink.forgotten == ["a"]

    run(script)


def test_a_path_that_is_cut_holds_up_no_other_peer() -> None:
    async def script(both: Both) -> None:
        both.fabric.cut(SINK.peer_id, SOURCE.peer_id)
        both.prefill_pairs.peer_up(SOURCE)
        await both.until(lambda: bool(both.source.sent))
        loop = asyncio.get_running_loop()
        waits_s = []
        while len(epochs(both.sink.sent)) < 2:  # a whole probe, up to its time-out
            began_s = loop.time()
            await both.sink.transfers.call(lambda transport: transport.num_in_flight())  # what a READ of another pair would wait for
            waits_s.append(loop.time() - began_s)
            await asyncio.sleep(0.01)
        assert max(waits_s) < NETWORK.timers.read_suspect_s / 2
        assert len(waits_s) > 5

    run(script)
