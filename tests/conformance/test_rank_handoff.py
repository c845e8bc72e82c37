"""Hand-offs between two workers whose ranks are cut differently: every rank a process, bytes by NIXL from rank to rank.

Sessions, pools and group transports are the real ones, in this process; messages are handed over at once. Every block must arrive where
the geometry says, with its bytes, having crossed the wire once.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import EXCHANGE, BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import EngineFault
from kv_transfer.geometry import CacheSharding, plan_move, rank_peer
from kv_transfer.handoff import RECORD_SCHEMA, DestroyAgent, Dropped, Effect, PostRead, Ready, RecordArrived, Send, ShareBlocks, SuspectPeer
from kv_transfer.identity import BlockId, Incarnation, RequestId, TransferId, WorkerId, pack_tokens, peer_id
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import HandoffRecord, OpenSink, SamplingParameters, StartSource, WorkerAddress
from kv_transfer.pairing import PairTerms
from kv_transfer.sink_session import SinkSession
from kv_transfer.source_session import SourceSession
from kv_transfer.transports.group import GroupTransport
from tests.probing import read_probe
from tests.rank_processes import RankProcess

LAYOUT = CacheLayout(4, (CacheComponent("latent", (0, 1), 8192, "test"),), "model", "tokenizer")
NUM_LOCAL_BLOCKS = 24
SOURCE_INCARNATION, SINK_INCARNATION = Incarnation(0xA), Incarnation(0xD)
SOURCE, SINK, ROUTER = peer_id("prefill-0", SOURCE_INCARNATION), peer_id("decode-0", SINK_INCARNATION), peer_id("gateway-0", Incarnation(6))
STRANGER = Holder(HolderKind.REQUEST, "stranger")
POISON = 0xEE
WITHIN_S = 30.0

replicated, by_block = CacheSharding.replicated, CacheSharding.by_block
SOURCES = {"replicated 1": replicated(1), "replicated 2": replicated(2), "replicated 4": replicated(4), "by_block 2": by_block(2)}
SINKS = {"by_block 1": by_block(1), "by_block 2": by_block(2), "by_block 4": by_block(4), "replicated 2": replicated(2)}


def start_ranks(party: str, incarnation: Incarnation, count: int, timeout_s: float = 60.0) -> list[RankProcess]:
    return [
        RankProcess(party, incarnation, rank, num_blocks=NUM_LOCAL_BLOCKS, block_bytes=LAYOUT.block_bytes, timeout_s=timeout_s)
        for rank in range(count)
    ]


def content_of(tokens: Sequence[int], block: int) -> bytes:
    """Depends on all tokens up to the block's last."""
    digest = hashlib.sha256(pack_tokens(tokens[: 4 * block + 4])).digest()
    return digest * (LAYOUT.block_bytes // len(digest))


class Side:
    """One worker: its ranks, its pool with scattered ids, its transport."""

    def __init__(self, ranks: Sequence[RankProcess], sharding: CacheSharding, rng: random.Random) -> None:
        self.sharding = sharding
        self.ranks = ranks[: sharding.num_ranks]
        self.pool = BlockPool(NUM_LOCAL_BLOCKS * sharding.num_homes, LAYOUT.block_size_tokens, sharding.num_homes)
        taken = self.pool.allocate(7 * sharding.num_homes, STRANGER)
        self.pool.release(rng.sample(taken, len(taken) // 2), STRANGER)
        self.transport = GroupTransport([rank.transport for rank in self.ranks], sharding)
        pool = self.ranks[0].transport.pool
        self.terms = PairTerms(
            layout=LAYOUT,
            weights_version="w",
            base_address=pool.base_address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            sharding=sharding,
        )

    def poison(self) -> None:
        for rank in self.ranks:
            for local_id in range(NUM_LOCAL_BLOCKS):
                rank.fill(local_id, POISON)

    def store(self, block_id: BlockId, content: bytes) -> None:
        for rank in self.sharding.ranks(block_id):
            self.ranks[rank].write(self.sharding.local_id(block_id), content)

    def read(self, rank: int, block_id: BlockId) -> bytes:
        return self.ranks[rank].read(self.sharding.local_id(block_id))


class Pair:
    """Both workers and what a router would do."""

    def __init__(
        self, sources: Sequence[RankProcess], sinks: Sequence[RankProcess], source: CacheSharding, sink: CacheSharding, seed: int
    ) -> None:
        rng = random.Random(seed)
        self.source, self.sink = Side(sources, source, rng), Side(sinks, sink, rng)
        timers = ProtocolTimers()
        self.source_session = SourceSession(self.source.pool, SOURCE_INCARNATION, timers, LAYOUT.component_mask, source)
        self.sink_session = SinkSession(self.sink.pool, SINK_INCARNATION, timers, LAYOUT, True, sharding=sink)
        self.ready: set[TransferId] = set()
        self.dropped: dict[TransferId, str] = {}
        self.shared: list[ShareBlocks] = []
        self.reads: list[PostRead] = []
        self.connect()

    def connect(self) -> None:
        self.sink.transport.open_peer(SOURCE)
        self.sink.transport.connect_peer(SOURCE, self.source.terms.offer(self.source.transport.open_peer(SINK)))
        read_probe(self.sink.transport, SOURCE, SOURCE_INCARNATION, WITHIN_S)

    def hand_off(self, tokens: Sequence[int], request: str, attempt: int = 1) -> TransferId:
        """A whole hand-off in chunks of three blocks; returns when it is READY or has ended."""
        transfer = TransferId(RequestId(request), attempt, SOURCE_INCARNATION, SINK_INCARNATION)
        sampling = SamplingParameters(max_tokens=4, seed=1)
        packed = pack_tokens(tokens)
        address = WorkerAddress(WorkerId("prefill-0"), SOURCE_INCARNATION, "", 0)
        opened = OpenSink(transfer, packed, len(tokens), 0, b"salt", sampling, 0, 1000.0, address)
        self.do(self.sink_session.open(opened, ROUTER, SOURCE, 0.0))
        need_from = self.sink_session.have_tokens(transfer)
        back = WorkerAddress(WorkerId("decode-0"), SINK_INCARNATION, "", 0)
        start = StartSource(transfer, packed, len(tokens), 0, need_from, b"salt", sampling, 0, 1000.0, back)
        _, effects = self.source_session.start(start, ROUTER, SINK, 0.0)
        self.do(effects)
        self.compute(transfer, tokens)
        end_s = time.monotonic() + WITHIN_S
        while transfer not in self.ready and transfer not in self.dropped:
            assert time.monotonic() < end_s, "the hand-off hangs"
            self.poll()
        return transfer

    def compute(self, transfer: TransferId, tokens: Sequence[int]) -> None:
        """What the source's engine does."""
        pool, size = self.source.pool, LAYOUT.block_size_tokens
        compute = Holder(HolderKind.COMPUTE, transfer)
        keys = block_keys(pack_tokens(tokens), b"salt", size, False)
        table = pool.pin(keys[: (len(tokens) - 1) // size], compute)
        num_cached = len(table)
        self.do(self.source_session.computing(transfer, 0.0))
        table += pool.allocate(-(-len(tokens) // size) - num_cached, compute, num_cached)
        start = 0
        while start < len(tokens) and transfer not in self.dropped:
            end = min(start + 3 * size, len(tokens))
            for block in range(max(start // size, num_cached), -(-end // size)):
                self.source.store(table[block], content_of(tokens, block))
                if block < len(keys):
                    pool.publish(table[block], keys[block])
            self.do(self.source_session.seal(transfer, start, end, tuple(table[start // size : -(-end // size)]), 0.0))
            self.poll()
            start = end
        self.do(self.source_session.complete(transfer, HandoffRecord(RECORD_SCHEMA, 0, 42, None, 1, 0), 0.0))
        pool.release_all(compute)

    def poll(self) -> None:
        for outcome in self.sink.transport.poll():
            if outcome.error is None:
                self.do(self.sink_session.read_done(outcome.read_id, 0.0))
            else:
                self.do(self.sink_session.read_failed(outcome.read_id, outcome.error, 0.0))

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if peer == SOURCE:
                        self.do(self.source_session.receive(SINK, message, 0.0))
                    elif peer == SINK:
                        self.do(self.sink_session.receive(SOURCE, message, 0.0))
                case PostRead():
                    self.reads.append(effect)
                    self.sink.transport.post_read(effect)
                case ShareBlocks():
                    self.shared.append(effect)
                case DestroyAgent(peer):
                    self.sink.transport.destroy_peer(peer)
                    self.do(self.sink_session.agent_destroyed(peer, 0.0))
                case Dropped(transfer, reason) if transfer not in self.ready:
                    self.dropped.setdefault(transfer, reason)
                case Ready(transfer):
                    self.ready.add(transfer)
                case _:
                    assert isinstance(effect, Dropped | RecordArrived | SuspectPeer)

    def share(self) -> None:
        """What the next step begins with, here by way of this process."""
        for effect in self.shared:
            for block_id, rank in effect.copies:
                self.sink.store(block_id, self.sink.read(rank, block_id))
                self.sink.pool.release([block_id], EXCHANGE)
        self.shared.clear()

    def close(self) -> None:
        self.sink.transport.destroy_peer(SOURCE)
        self.source.transport.destroy_peer(SINK)

    def assert_arrived(self, transfer: TransferId, tokens: Sequence[int], first_read: int) -> None:
        """From logical block `first_read` on, each on the rank that reads it and on no other."""
        table = self.sink_session.block_table(transfer)
        for block in range(first_read, -(-len(tokens) // LAYOUT.block_size_tokens)):
            for rank in self.sink.sharding.ranks(table[block]):
                found = self.sink.read(rank, table[block])
                if rank == block % self.sink.sharding.num_ranks:
                    assert found == content_of(tokens, block), f"block {block} on rank {rank}"
                else:
                    assert set(found) == {POISON}, f"block {block} crossed the wire to rank {rank}, too"

    def assert_moved_once(self) -> None:
        """The counters are those of a plan of all READs, each block in one part."""
        planned: Counter[tuple[int, int]] = Counter()
        for read in self.reads:
            for part in plan_move(self.source.sharding, self.sink.sharding, read.first_block, read.local_ids, read.remote_ids):
                planned[part.sink_rank, part.source_rank] += len(part.sink_ids) * LAYOUT.block_bytes
        assert self.sink.transport.bytes_moved == planned
        num_blocks = sum(len(read.local_ids) for read in self.reads)
        assert sum(planned.values()) == num_blocks * LAYOUT.block_bytes

    def assert_no_leaks(self) -> None:
        self.share()
        for side in (self.source, self.sink):
            side.pool.release_all(STRANGER)
            assert side.pool.audit().is_quiesced, side.pool.audit().holders
        self.sink_session.audit()


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[list[RankProcess], list[RankProcess]]]:
    """Four processes a side, which every layout uses the first of."""
    sources, sinks = start_ranks("prefill-0", SOURCE_INCARNATION, 4), start_ranks("decode-0", SINK_INCARNATION, 4)
    yield sources, sinks
    for process in (*sources, *sinks):
        process.stop()


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_block_arrives_once_and_where_it_belongs(ranks: tuple[list[RankProcess], list[RankProcess]], source: str, sink: str) -> None:
    pair = Pair(*ranks, SOURCES[source], SINKS[sink], seed=len(source) * len(sink))
    pair.sink.poison()
    tokens = list(range(38))  # nine whole blocks and a half
    first = pair.hand_off(tokens, "a")
    assert first in pair.ready
    pair.assert_arrived(first, tokens, 0)
    pair.assert_moved_once()
    num_read = sum(len(read.local_ids) for read in pair.reads)
    assert num_read == 10
    num_copied = sum(len(effect.copies) for effect in pair.shared)
    assert num_copied == (num_read if pair.sink.sharding.num_copies > 1 else 0)
    pair.share()
    table = pair.sink_session.block_table(first)
    for block, block_id in enumerate(table[:10]):
        for rank in pair.sink.sharding.ranks(block_id):
            assert pair.sink.read(rank, block_id) == content_of(tokens, block)

    # Another prompt with five blocks in common is read from the sixth on, from and to the ranks of its own places.
    longer = [*tokens[:20], *range(100, 123)]
    second = pair.hand_off(longer, "b")
    assert second in pair.ready
    assert pair.sink_session.have_tokens(second) == 20
    pair.assert_arrived(second, longer, 5)
    pair.assert_moved_once()
    for transfer in (first, second):
        pair.do(pair.sink_session.running(transfer, 0.0))
        pair.do(pair.sink_session.finished(transfer, 0.0))
    pair.assert_no_leaks()
    pair.close()


def test_a_rank_whose_agent_is_gone_fails_the_read_and_the_next_agents_serve(
    ranks: tuple[list[RankProcess], list[RankProcess]],
) -> None:
    pair = Pair(*ranks, replicated(2), by_block(4), seed=1)
    pair.sink.poison()
    pair.sink.ranks[3].destroy_agent(rank_peer(SOURCE, 1))
    tokens = list(range(38))
    failed = pair.hand_off(tokens, "a")
    assert pair.dropped[failed] == "read_failed"
    assert pair.sink.transport.num_in_flight() == 0
    pair.connect()
    again = pair.hand_off(tokens, "a", attempt=2)
    assert again in pair.ready
    pair.do(pair.sink_session.running(again, 0.0))
    pair.do(pair.sink_session.finished(again, 0.0))
    pair.assert_no_leaks()
    pair.close()


def test_a_source_rank_that_dies_costs_the_attempt_and_a_sink_rank_that_dies_the_worker() -> None:
    sources, sinks = start_ranks("prefill-0", SOURCE_INCARNATION, 2), start_ranks("decode-0", SINK_INCARNATION, 2)
    try:
        pair = Pair(sources, sinks, replicated(2), replicated(2), seed=2)
        pair.sink.poison()
        first = pair.hand_off(list(range(16)), "a")
        assert first in pair.ready
        # What it stores from now on only rank 0 has; rank 1 is killed before it is read.
        pair.source.store = lambda block_id, content: sources[0].write(block_id, content)  # type: ignore[method-assign]
        sources[1].kill()
        lost = pair.hand_off([*range(16), *range(50, 74)], "b")
        assert pair.dropped[lost] == "read_failed"
        assert pair.sink.transport.num_in_flight() == 0
        table = pair.sink_session.block_table(first)
        for block in range(4):
            assert pair.sink.read(block % 2, table[block]) == content_of(range(16), block), "what was committed stays"
        pair.do(pair.sink_session.running(first, 0.0))
        pair.do(pair.sink_session.finished(first, 0.0))
        pair.share()
        pair.sink.pool.release_all(STRANGER)
        assert pair.sink.pool.audit().is_quiesced
        sources[0].transport.close()
        assert sources[0].ended() == [], "a rank that is closed has no fault"
        sinks[0].hang_up()
        assert sinks[0].ended() == ["PeerLost"], "a rank that loses rank 0 must end"
        sinks[1].kill()
        with pytest.raises(EngineFault, match="rank 1 of this worker have ended"):
            pair.sink.transport.open_peer(SOURCE)
    finally:
        for process in (*sources, *sinks):
            process.stop()
