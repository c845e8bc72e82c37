"""Hand-offs under random schedules: messages lost, repeated, overtaken and late; READs that raise, hang or land late; aborts,
restarts, lease ends, preemption. Hypothesis shrinks what fails to a short story.

After every move: no byte in a foreign block, the pools add up, what is promised is there, and whatever the prefix indices or a
committed chunk say is exactly what the tokens say. At the end everything closes and nothing is held.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import EXCHANGE, BlockPool, Holder, HolderKind
from kv_transfer.errors import PoolExhausted
from kv_transfer.geometry import ONE_RANK, CacheSharding
from kv_transfer.handoff import Effect, FillLocally, SinkState
from kv_transfer.identity import BlockId, PackedTokens, TransferId, count_tokens
from kv_transfer.messages import Cancel
from kv_transfer.sink_session import SinkSession
from kv_transfer.source_session import SourceSession
from kv_transfer.transports.loopback import FaultPlan
from tests.handoff_pair import BLOCK_SIZE, SALT, HandoffPair, block_bytes, views_of

STRANGER = Holder(HolderKind.REQUEST, "stranger")
PLANS = {
    "calm": FaultPlan(),
    "faulty": FaultPlan(error_rate=0.1, hang_rate=0.1),
    "unproven": FaultPlan(error_rate=0.1, hang_rate=0.1, destroying_proven=False),
}

RANKS = {
    "replicated 2 to by_block 4": (CacheSharding.replicated(2), CacheSharding.by_block(4)),
    "by_block 2 to replicated 2": (CacheSharding.by_block(2), CacheSharding.replicated(2)),
    "one to two pairs by block": (ONE_RANK, CacheSharding(4, 2)),
}


def prompt(request: str, length: int) -> list[int]:
    """Requests a and b share their first two blocks."""
    return [*range(2 * BLOCK_SIZE), *(ord(request) * 100 + index for index in range(length))][:length]


WEIGHTS = {
    "progress": 120,
    "begin": 10,
    "deliver": 8,
    "deliver_and_keep": 6,
    "lose": 2,
    "poll": 4,
    "land": 4,
    "store": 4,
    "share": 2,
    "wait": 4,
    "cancel": 3,
    "open_again": 1,
    "start_again": 1,
    "preempt": 2,
    "resume": 2,
    "stranger_takes": 8,
    "stranger_gives": 4,
    "link_breaks": 1,
    "restart": 1,
}
MOVES = [move for move, weight in WEIGHTS.items() for _ in range(weight)]
ItemT = TypeVar("ItemT")


def chosen(items: Iterable[ItemT], pick: int) -> ItemT:
    """One of the items; the same for the same pick."""
    listed = list(items)
    return listed[pick % len(listed)]


class HandoffMachine(RuleBasedStateMachine):
    """Everything that may happen to a pair of workers."""

    plan = PLANS["faulty"]
    source_type: type[SourceSession] = SourceSession
    sink_type: type[SinkSession] = SinkSession
    shardings = (ONE_RANK, ONE_RANK)

    @initialize(seed=st.integers(0, 2**16), num_blocks=st.sampled_from([8, 12]), chunk_blocks=st.integers(1, 2))
    def set_up(self, seed: int, num_blocks: int, chunk_blocks: int) -> None:
        self.pair = HandoffPair(
            num_source_blocks=num_blocks,
            num_sink_blocks=num_blocks,
            chunk_tokens=chunk_blocks * BLOCK_SIZE,
            plan=self.plan,
            seed=seed,
            source_type=self.source_type,
            sink_type=self.sink_type,
            source_sharding=self.shardings[0],
            sink_sharding=self.shardings[1],
        )
        self.attempts: dict[str, int] = {}
        self.tokens: dict[TransferId, PackedTokens] = {}
        self.expected: dict[bytes, bytes] = {}
        self.num_seen = 0

    @rule(move=st.sampled_from(MOVES), pick=st.integers(0, 255))
    def act(self, move: str, pick: int) -> None:
        """One move; `pick` chooses what it is done to. A move that is not possible now does nothing."""
        getattr(self, move)(pick)

    def progress(self, pick: int) -> None:
        """Something that carries a hand-off on, if there is anything: what a calm pair of workers would do, in any order."""
        pair = self.pair
        options = [self.deliver] * (2 * bool(pair.wire)) + [self.land, self.land] * bool(pair.fabric.pieces())
        options += [self.poll] * bool(pair.reads) + [self.complete] * bool(pair.steps)
        options += [self.launch] * bool(len(pair.sequences) > len(pair.steps)) + [self.run, self.finish] * bool(pair.ready)
        if options:
            chosen(options, pick)(pick // len(options))
        else:
            self.begin(pick)

    # -- the router ----------------------------------------------------------------------------------------------------

    def begin(self, pick: int) -> None:
        """The next attempt of one of three requests: OPEN_SINK and, where a source computes, START_SOURCE."""
        idle = [
            name for name in "abc" if not any(self.pair.sink.is_live(transfer) for transfer in self.tokens if transfer.request_id == name)
        ]
        request = chosen(idle if idle and pick % 8 else "abc", pick)
        attempt = self.attempts[request] = self.attempts.get(request, 0) + 1
        tokens = prompt(request, 1 + pick // 3 % (4 * BLOCK_SIZE))
        transfer = self.pair.open(tokens, request=request, attempt=attempt, local=pick > 240, deadline_s=200.0)
        self.tokens[transfer] = self.pair.opened[transfer].tokens
        for block, key in enumerate(block_keys(self.tokens[transfer], SALT, BLOCK_SIZE, False)):
            self.expected[key] = block_bytes(self.tokens[transfer], block)
        self.fill_locally()
        if self.pair.sink.is_live(transfer) and transfer.source_incarnation:
            self.pair.start(transfer)

    def open_again(self, pick: int) -> None:
        if self.tokens:
            self.pair.open_again(chosen(self.tokens, pick))

    def start_again(self, pick: int) -> None:
        if self.tokens and chosen(self.tokens, pick).source_incarnation:
            self.pair.start(chosen(self.tokens, pick))

    def cancel(self, pick: int) -> None:
        if self.tokens:
            self.pair.tell("sink" if pick % 2 else "source", Cancel(chosen(self.tokens, pick // 2), "abort"))

    # -- the wire ------------------------------------------------------------------------------------------------------

    def deliver(self, pick: int) -> None:
        if self.pair.wire:
            self.pair.deliver(pick % len(self.pair.wire))

    def deliver_and_keep(self, pick: int) -> None:
        if self.pair.wire:
            self.pair.deliver(pick % len(self.pair.wire), keep=True)

    def lose(self, pick: int) -> None:
        if self.pair.wire:
            self.pair.wire.pop(pick % len(self.pair.wire))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def land(self, pick: int) -> None:
        if self.pair.fabric.pieces():
            self.pair.fabric.land(chosen(self.pair.fabric.pieces(), pick))

    def land_all(self, pick: int) -> None:
        self.pair.land_all()

    def poll(self, pick: int) -> None:
        self.pair.poll_reads()

    # -- the workers ---------------------------------------------------------------------------------------------------

    def launch(self, pick: int) -> None:
        if self.pair.sequences:
            self.pair.launch(chosen(self.pair.sequences, pick))

    def store(self, pick: int) -> None:
        if self.pair.steps:
            self.pair.store(chosen(self.pair.steps, pick))

    def complete(self, pick: int) -> None:
        if self.pair.steps:
            self.pair.complete(chosen(self.pair.steps, pick), record_index=5 if pick % 8 == 7 else None)

    def share(self, pick: int) -> None:
        self.pair.share()

    def run(self, pick: int) -> None:
        self.decode(pick, (SinkState.READY,), self.pair.sink.running)

    def finish(self, pick: int) -> None:
        self.decode(pick, (SinkState.READY, SinkState.RUNNING), self.pair.sink.finished)

    def preempt(self, pick: int) -> None:
        self.decode(pick, (SinkState.READY, SinkState.RUNNING), self.pair.sink.preempted)

    def decode(self, pick: int, states: tuple[SinkState, ...], method: Callable[[TransferId, float], list[Effect]]) -> None:
        possible = [transfer for transfer in sorted(self.pair.ready) if self.pair.sink._transfers[transfer].state in states]
        if possible:
            self.pair.do("sink", method(chosen(possible, pick), self.pair.now_s))

    def resume(self, pick: int) -> None:
        possible = [transfer for transfer in sorted(self.pair.ready) if self.pair.sink._transfers[transfer].state is SinkState.PREEMPTED]
        if possible:
            transfer = chosen(possible, pick)
            with contextlib.suppress(PoolExhausted):
                self.pair.do("sink", self.pair.sink.resume(transfer, self.tokens[transfer], self.pair.now_s))
                self.fill_locally()

    def stranger_takes(self, pick: int) -> None:
        pool = self.pool(bool(pick % 2))
        count = min(1 + pick // 2 % 8, pool.num_unpromised)
        for block_id in pool.allocate(max(count, 0), STRANGER):
            for view in self.views(bool(pick % 2), block_id):
                view[:] = b"\xee" * len(view)

    def stranger_gives(self, pick: int) -> None:
        self.pool(bool(pick % 2)).release_all(STRANGER)

    # -- time and death ------------------------------------------------------------------------------------------------

    def wait(self, pick: int) -> None:
        self.pair.now_s += (1.1, 0.1, 1.1, 0.1, 1.1, 3.1, 6.0, 11.0, 16.0, 31.0)[pick % 10]
        self.pair.tick()

    def restart(self, pick: int) -> None:
        """A process starts again under its name; the other side learns of it at once, or only from what it hears."""
        old_source, old_sink = self.pair.source_peer, self.pair.sink_peer
        if pick % 2:
            self.pair.start_source_process()
            if pick % 4 == 1:
                self.pair.do("sink", self.pair.sink.peer_lost(old_source, self.pair.now_s))
        else:
            self.pair.start_sink_process()
            if pick % 4 == 0:
                self.pair.do("source", self.pair.source.peer_lost(old_sink, self.pair.now_s))

    def link_breaks(self, pick: int) -> None:
        if pick % 2:
            self.pair.do("sink", self.pair.sink.peer_lost(self.pair.source_peer, self.pair.now_s))
        else:
            self.pair.do("source", self.pair.source.peer_lost(self.pair.sink_peer, self.pair.now_s))

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def the_pools_add_up(self) -> None:
        if hasattr(self, "pair"):
            self.pair.source_pool.audit()
            self.pair.sink_pool.audit()
            self.pair.sink.audit()

    @invariant()
    def no_byte_is_in_a_foreign_block(self) -> None:
        if hasattr(self, "pair"):
            assert self.pair.fabric.foreign_bytes == []

    @invariant()
    def what_is_indexed_or_committed_is_right(self) -> None:
        if not hasattr(self, "pair"):
            return
        for on_sink in (False, True):
            pool = self.pool(on_sink)
            for key, block_id in pool._block_of.items():
                right = [bytes(view) == self.expected[key] for view in self.views(on_sink, block_id)]
                is_shared = EXCHANGE not in pool.holders(block_id)
                assert all(right) if is_shared else any(right), f"block {block_id} is not what its key says"
        for handoff in self.pair.sink._transfers.values():
            if handoff.state in (SinkState.FILLING, SinkState.READY, SinkState.RUNNING):
                self.check_committed(handoff.transfer, handoff.chunks, handoff.committed)

    def check_committed(self, transfer: TransferId, chunks: dict, committed: set[int]) -> None:  # type: ignore[type-arg]
        for number in committed & set(chunks):
            for place, block_id in enumerate(chunks[number].local_ids):
                expected = block_bytes(self.tokens[transfer], chunks[number].start // BLOCK_SIZE + place)
                right = [bytes(view) == expected for view in self.views(True, block_id)]
                is_shared = EXCHANGE not in self.pair.sink_pool.holders(block_id)
                assert all(right) if is_shared else any(right), f"chunk {number} of {transfer} is committed and wrong"

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for transfer in self.tokens:
            self.pair.tell("sink", Cancel(transfer, "over"))
            self.pair.tell("source", Cancel(transfer, "over"))
        while self.pair.steps:
            self.pair.complete(self.pair.steps[0])
        self.pair.settle()
        self.pair.wait(40.0, 10.0)
        self.pair.settle()
        for on_sink in (False, True):
            self.pool(on_sink).release_all(STRANGER)
        for piece in self.pair.fabric.pieces():
            self.pair.fabric.land(piece)
        self.no_byte_is_in_a_foreign_block()
        self.pair.assert_no_leaks()

    # -- pieces --------------------------------------------------------------------------------------------------------

    def pool(self, on_sink: bool) -> BlockPool:
        return self.pair.sink_pool if on_sink else self.pair.source_pool

    def views(self, on_sink: bool, block_id: BlockId) -> list[memoryview]:
        """The block's bytes on every rank that has it."""
        if on_sink:
            return views_of(self.pair.sink_memories, self.pair.sink_sharding, block_id)
        return views_of(self.pair.source_memories, self.pair.source_sharding, block_id)

    def fill_locally(self) -> None:
        """Compute what the last FillLocally asks for, as the decode worker would."""
        effect = self.pair.events[-1] if self.pair.events else None
        if not isinstance(effect, FillLocally):
            return
        tokens = self.tokens[effect.transfer]
        table = self.pair.sink.block_table(effect.transfer)
        keys = block_keys(tokens, SALT, BLOCK_SIZE, False)
        for block in range(effect.from_token // BLOCK_SIZE, -(-count_tokens(tokens) // BLOCK_SIZE)):
            for view in self.views(True, table[block]):
                view[:] = block_bytes(tokens, block)
            if block < len(keys):
                self.pair.sink_pool.publish(table[block], keys[block])
        self.pair.do("sink", self.pair.sink.filled_locally(effect.transfer, self.pair.now_s))
        self.pair.ready.add(effect.transfer)


QUICK = settings(
    max_examples=150,
    stateful_step_count=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
LONG = settings(QUICK, max_examples=1500, stateful_step_count=250)


@pytest.mark.parametrize("plan", PLANS)
def test_random_schedules_never_mix_bytes_and_always_end(plan: str) -> None:
    run_state_machine_as_test(type("Machine", (HandoffMachine,), {"plan": PLANS[plan]}), settings=QUICK)


@pytest.mark.parametrize("layouts", RANKS)
def test_nor_do_they_between_workers_of_several_ranks(layouts: str) -> None:
    members = {"plan": PLANS["faulty"], "shardings": RANKS[layouts]}
    run_state_machine_as_test(type("Machine", (HandoffMachine,), members), settings=settings(QUICK, max_examples=50))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_long_random_schedules_never_mix_bytes_and_always_end(plan: str) -> None:
    run_state_machine_as_test(type("Machine", (HandoffMachine,), {"plan": PLANS[plan]}), settings=LONG)
