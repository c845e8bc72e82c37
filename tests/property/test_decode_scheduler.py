"""The decode scheduler keeps its budgets, preempts the youngest only, and lets every sequence end."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import DecodeLimits, DecodePlan, DecodeView, PreemptedSequence, decide
from glm_runtime.engine.chunk_plan import PrefillDemand
from kv_transfer.identity import SequenceId

BLOCK = 4


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def by_home(num_blocks: int, num_homes: int, first_block: int = 0) -> tuple[int, ...]:
    """Counted one by one."""
    places = [place % num_homes for place in range(first_block, first_block + num_blocks)]
    return tuple(places.count(home) for home in range(num_homes))


def added(counts: Iterable[tuple[int, ...]], start: tuple[int, ...]) -> tuple[int, ...]:
    for each in counts:
        start = tuple(map(add, start, each))
    return start


@st.composite
def views(draw: st.DrawFn) -> DecodeView:
    num_running = draw(st.integers(0, 6))
    num_homes = draw(st.sampled_from([1, 1, 2, 4]))

    def counts(largest: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(0, largest)) for _ in range(num_homes))

    filling = tuple(
        PrefillDemand(sequence_id=SequenceId(f"f{i}"), num_computed_tokens=0, num_tokens=draw(st.integers(1, 30)))
        for i in range(draw(st.integers(0, 3)))
    )
    preempted = tuple(
        PreemptedSequence(sequence_id=SequenceId(f"p{i}"), num_new_blocks=by_home(draw(st.integers(1, 8)), num_homes))
        for i in range(draw(st.integers(0, 3)))
    )
    return DecodeView(
        running=tuple(SequenceId(f"r{i}") for i in range(num_running)),
        free_slots=tuple(draw(st.integers(0, 4)) for _ in range(num_running)),
        credit_blocks=tuple(draw(st.integers(0, 1)) for _ in range(num_running)),
        freed_blocks=tuple(counts(3) for _ in range(num_running)),
        filling=filling,
        preempted=preempted,
        num_available_blocks=counts(12 // num_homes),
        num_drafts=tuple(draw(st.integers(0, 6)) for _ in range(num_running)) if draw(st.booleans()) else (),
        next_homes=tuple(draw(st.integers(0, num_homes - 1)) for _ in range(num_running)) if num_homes > 1 else (),
    )


LIMITS = DecodeLimits(max_step_tokens=24, max_chunk_tokens=12, block_size_tokens=BLOCK)


@given(views())
def test_one_plan_keeps_every_limit(view: DecodeView) -> None:
    plan = decide(view, LIMITS)
    num_chunk_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
    assert len(plan.rows) + sum(plan.row_drafts) + num_chunk_tokens <= LIMITS.max_step_tokens
    assert not plan.rows or num_chunk_tokens <= LIMITS.max_chunk_tokens
    had = added((view.freed_blocks[view.running.index(sequence_id)] for sequence_id in plan.preempt), view.num_available_blocks)
    new_blocks = {sequence.sequence_id: sequence.num_new_blocks for sequence in view.preempted}
    grown = [view.running.index(sequence_id) for sequence_id in plan.grow]
    beyond_credit = [view.next_home(index) for index in grown if view.credit_blocks[index] == 0]
    taken = added((new_blocks[sequence_id] for sequence_id in plan.resume), tuple(map(beyond_credit.count, range(len(had)))))
    assert min(map(sub, had, taken)) >= 0, "blocks of a home are planned that it does not have"


@given(views())
def test_rows_have_room_and_victims_are_the_youngest(view: DecodeView) -> None:
    plan = decide(view, LIMITS)
    free_slots = dict(zip(view.running, view.free_slots, strict=True))
    assert all(free_slots[sequence_id] > 0 or sequence_id in plan.grow for sequence_id in plan.rows)
    kept = len(view.running) - len(plan.preempt)
    assert plan.preempt == tuple(reversed(view.running[kept:]))
    assert set(plan.rows) | set(plan.grow) <= set(view.running[:kept])
    assert not (plan.preempt and plan.resume), "nobody comes back in the step in which somebody had to go"


@given(views())
def test_drafts_have_room_and_cost_nobody_anything(view: DecodeView) -> None:
    plan = decide(view, LIMITS)
    plain = decide(dataclasses.replace(view, num_drafts=()), LIMITS)
    assert (plan.preempt, plan.rows) == (plain.preempt, plain.rows)
    assert set(plain.grow) <= set(plan.grow)
    assert set(plan.resume) <= set(plain.resume)
    assert [chunk.sequence_id for chunk in plan.chunks] == [chunk.sequence_id for chunk in plain.chunks]
    wanted = dict(zip(view.running, view.num_drafts or (0,) * len(view.running), strict=True))
    free_slots = dict(zip(view.running, view.free_slots, strict=True))
    for sequence_id, num_drafts in zip(plan.rows, plan.row_drafts, strict=True):
        assert 0 <= num_drafts <= wanted[sequence_id]
        assert 1 + num_drafts <= free_slots[sequence_id] + BLOCK * (sequence_id in plan.grow)


@given(views())
def test_no_fewer_preemptions_would_do(view: DecodeView) -> None:
    """Brute force: the fewest youngest that must go so that each older row moves in order of age, or nobody younger is left."""
    plan = decide(view, LIMITS)

    def stuck_before(kept: int) -> int | None:
        left = list(added(view.freed_blocks[kept:], view.num_available_blocks))
        for index in range(kept):
            if view.free_slots[index] == 0 and view.credit_blocks[index] == 0:
                left[view.next_home(index)] -= 1
            if min(left) < 0:
                return index
        return None

    kept = len(view.running)
    while (stuck := stuck_before(kept)) is not None and stuck < kept - 1:
        kept -= 1
    assert len(view.running) - len(plan.preempt) == kept


@given(views())
def test_a_view_without_credit_says_that_everybody_has_room(view: DecodeView) -> None:
    most = max(view.num_drafts, default=0)
    roomy = dataclasses.replace(view, free_slots=tuple(most + 1 + slots for slots in view.free_slots))
    assert decide(roomy, LIMITS) == decide(dataclasses.replace(roomy, free_slots=(), credit_blocks=()), LIMITS)


@given(views(), st.integers(1, 4))
def test_who_grows_ahead_takes_nothing_from_anybody(view: DecodeView, ahead_tokens: int) -> None:
    plan, plain = decide(view, dataclasses.replace(LIMITS, ahead_tokens=ahead_tokens)), decide(view, LIMITS)
    assert (plan.preempt, plan.rows, plan.row_drafts) == (plain.preempt, plain.rows, plain.row_drafts)
    assert (plan.resume, plan.chunks) == (plain.resume, plain.chunks)
    assert set(plain.grow) <= set(plan.grow)
    early = [sequence_id for sequence_id in plan.grow if sequence_id not in plain.grow]
    assert all(view.free_slots[view.running.index(sequence_id)] < ahead_tokens for sequence_id in early)
    for home, had in enumerate(view.num_available_blocks):
        grown = [view.running.index(sequence_id) for sequence_id in plain.grow]
        beyond_credit = sum(view.credit_blocks[index] == 0 and view.next_home(index) == home for index in grown)
        early_here = sum(view.next_home(view.running.index(sequence_id)) == home for sequence_id in early)
        assert not early_here or had - beyond_credit - early_here >= len(view.running)


@dataclass
class Sequence:
    sequence_id: SequenceId
    num_tokens: int
    to_emit: int
    num_blocks: int = 0
    num_stored: int = 0
    is_running: bool = False


@dataclass
class Worker:
    """A decode worker reduced to counters; every sequence fits the pool alone. pool_blocks: of all homes, as many of each."""

    pool_blocks: int
    num_homes: int = 1
    live: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def blocks(self, num_blocks: int, first_block: int = 0) -> tuple[int, ...]:
        return by_home(num_blocks, self.num_homes, first_block)

    def num_available(self) -> tuple[int, ...]:
        used = added((self.blocks(sequence.num_blocks) for sequence in self.live), (0,) * self.num_homes)
        return tuple(map(sub, self.blocks(self.pool_blocks), used))

    def admit(self, sequence: Sequence) -> bool:
        needed = blocks_of(sequence.num_tokens)
        is_full = min(map(sub, self.num_available(), self.blocks(needed))) < 0
        if is_full or any(other.num_blocks == 0 for other in self.live):
            return False
        sequence.num_blocks = needed
        self.live.append(sequence)
        return True

    def view(self) -> DecodeView:
        running = [sequence for sequence in self.live if sequence.is_running]
        return DecodeView(
            running=tuple(sequence.sequence_id for sequence in running),
            free_slots=tuple(sequence.num_blocks * BLOCK - sequence.num_stored for sequence in running),
            credit_blocks=(0,) * len(running),
            freed_blocks=tuple(self.blocks(sequence.num_blocks) for sequence in running),
            filling=tuple(
                PrefillDemand(sequence_id=s.sequence_id, num_computed_tokens=s.num_stored, num_tokens=s.num_tokens)
                for s in self.live
                if s.num_blocks and not s.is_running
            ),
            preempted=tuple(
                PreemptedSequence(sequence_id=s.sequence_id, num_new_blocks=self.blocks(blocks_of(s.num_tokens)))
                for s in self.live
                if not s.num_blocks
            ),
            num_available_blocks=self.num_available(),
            next_homes=tuple(sequence.num_blocks % self.num_homes for sequence in running) if self.num_homes > 1 else (),
        )

    def apply(self, plan: DecodePlan) -> None:
        by_id = {sequence.sequence_id: sequence for sequence in self.live}
        for sequence_id in plan.preempt:
            by_id[sequence_id].num_blocks = by_id[sequence_id].num_stored = 0
            by_id[sequence_id].is_running = False
            self.preemptions += 1
        for sequence_id in plan.grow:
            by_id[sequence_id].num_blocks += 1
        for sequence_id in plan.resume:
            by_id[sequence_id].num_blocks = blocks_of(by_id[sequence_id].num_tokens)
        assert min(self.num_available()) >= 0, "blocks overcommitted"
        for sequence_id in plan.rows:
            self._emit(by_id[sequence_id], by_id[sequence_id].num_stored + 1)
        for chunk in plan.chunks:
            sequence = by_id[chunk.sequence_id]
            if chunk.is_last:
                self._emit(sequence, chunk.end)
            else:
                sequence.num_stored = chunk.end

    def _emit(self, sequence: Sequence, num_stored: int) -> None:
        sequence.num_stored = num_stored
        sequence.num_tokens += 1
        sequence.to_emit -= 1
        sequence.is_running = True
        if sequence.to_emit == 0:
            self.live.remove(sequence)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 24)), min_size=1, max_size=8),
    st.sampled_from([(12, 1), (13, 1), (14, 1), (15, 1), (16, 1), (12, 2), (14, 2), (12, 3), (12, 4), (16, 4)]),
)
def test_every_sequence_ends_however_small_the_pool(requests: list[tuple[int, int]], pool: tuple[int, int]) -> None:
    pool_blocks, num_homes = pool
    worker = Worker(pool_blocks, num_homes)
    outside = [Sequence(SequenceId(f"s{i}"), num_tokens, to_emit) for i, (num_tokens, to_emit) in enumerate(requests)]
    # Each token may cost at worst one whole recomputation of its sequence, and while one is recomputed the others may wait.
    bound = sum(to_emit * (3 + blocks_of(num_tokens + to_emit)) for num_tokens, to_emit in requests)
    for _ in range(bound):
        while outside and worker.admit(outside[0]):
            outside.pop(0)
        worker.apply(decide(worker.view(), LIMITS))
    assert not outside
    assert not worker.live
    assert sum(worker.num_available()) == pool_blocks


@pytest.mark.parametrize("num_homes", [1, 2, 4])
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_the_oldest_running_moves_in_every_step(num_homes: int, lengths: list[int]) -> None:
    worker = Worker(12, num_homes)
    for index, to_emit in enumerate(lengths):
        worker.admit(Sequence(SequenceId(f"s{index}"), 4, to_emit))
    while worker.live:
        oldest = worker.live[0]
        was_running, before = oldest.is_running, oldest.to_emit
        worker.apply(decide(worker.view(), LIMITS))
        assert oldest.to_emit == before - 1 or not was_running
