"""The prefill scheduler neither starves, overcommits blocks nor exceeds its budget, whatever arrives."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub

from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.engine.chunk_plan import PrefillDemand
from kv_transfer.identity import SequenceId
from prefill_worker.scheduler import PrefillLimits, PrefillView, WaitingPrefill, decide, urgency

BLOCK = 4


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def by_home(num_blocks: int, num_homes: int) -> tuple[int, ...]:
    """Counted one by one."""
    places = [place % num_homes for place in range(num_blocks)]
    return tuple(places.count(home) for home in range(num_homes))


def added(counts: Iterable[tuple[int, ...]], num_homes: int) -> tuple[int, ...]:
    total: tuple[int, ...] = (0,) * num_homes
    for each in counts:
        total = tuple(map(add, total, each))
    return total


def waiting_prefill(sequence_id: str, *, num_tokens: int, num_new_blocks: tuple[int, ...]) -> WaitingPrefill:
    return WaitingPrefill(sequence_id=SequenceId(sequence_id), num_cached_tokens=0, num_tokens=num_tokens, num_new_blocks=num_new_blocks)


@st.composite
def views(draw: st.DrawFn) -> PrefillView:
    computing = tuple(
        PrefillDemand(sequence_id=SequenceId(f"c{i}"), num_computed_tokens=draw(st.integers(0, 20)), num_tokens=draw(st.integers(21, 40)))
        for i in range(draw(st.integers(0, 3)))
    )
    num_homes = draw(st.sampled_from([1, 1, 2, 4]))

    def counts(largest: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(0, largest)) for _ in range(num_homes))

    waiting = tuple(
        waiting_prefill(f"w{i}", num_tokens=draw(st.integers(1, 40)), num_new_blocks=counts(10)) for i in range(draw(st.integers(0, 5)))
    )
    return PrefillView(computing=computing, waiting=waiting, num_available_blocks=counts(20))


limits = st.builds(PrefillLimits, max_step_tokens=st.integers(BLOCK, 64), max_computing=st.integers(1, 5), block_size_tokens=st.just(BLOCK))


@given(views(), limits)
def test_one_plan_keeps_every_limit(view: PrefillView, limits: PrefillLimits) -> None:
    plan = decide(view, limits)
    taken = {request.sequence_id: request.num_new_blocks for request in view.waiting}
    num_homes = len(view.num_available_blocks)
    assert min(map(sub, view.num_available_blocks, added((taken[sequence_id] for sequence_id in plan.admit), num_homes))) >= 0
    assert not plan.admit or len(view.computing) + len(plan.admit) <= limits.max_computing
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= limits.max_step_tokens


@given(views(), limits)
def test_admission_equals_the_longest_prefix_that_fits(view: PrefillView, limits: PrefillLimits) -> None:
    def fits(count: int) -> bool:
        blocks = added((request.num_new_blocks for request in view.waiting[:count]), len(view.num_available_blocks))
        is_room = min(map(sub, view.num_available_blocks, blocks)) >= 0
        return count == 0 or (is_room and len(view.computing) + count <= limits.max_computing)

    best = max(count for count in range(len(view.waiting) + 1) if all(fits(n) for n in range(count + 1)))
    assert decide(view, limits).admit == tuple(request.sequence_id for request in view.waiting[:best])


@dataclass
class Worker:
    """A prefill worker reduced to counters: `pool_blocks` blocks, sealed ones are taken a fixed number of steps later."""

    pool_blocks: int
    limits: PrefillLimits
    num_homes: int = 1
    waiting: list[tuple[float, SequenceId, int]] = field(default_factory=list)
    computing: dict[SequenceId, list[int]] = field(default_factory=dict)
    sealed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    done: list[SequenceId] = field(default_factory=list)

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        return by_home(blocks_of(num_tokens), self.num_homes)

    def num_available(self) -> tuple[int, ...]:
        held = [self.blocks(total) for _, total in self.computing.values()] + [blocks for _, blocks in self.sealed]
        return tuple(map(sub, by_home(self.pool_blocks, self.num_homes), added(held, self.num_homes)))

    def step(self, now: int, taken_after: int) -> None:
        self.sealed = [(until, blocks) for until, blocks in self.sealed if until > now]
        self.waiting.sort()
        view = PrefillView(
            computing=tuple(
                PrefillDemand(sequence_id=sequence_id, num_computed_tokens=done, num_tokens=total)
                for sequence_id, (done, total) in self.computing.items()
            ),
            waiting=tuple(
                waiting_prefill(sequence_id, num_tokens=total, num_new_blocks=self.blocks(total)) for _, sequence_id, total in self.waiting
            ),
            num_available_blocks=self.num_available(),
        )
        plan = decide(view, self.limits)
        for sequence_id in plan.admit:
            entry = next(entry for entry in self.waiting if entry[1] == sequence_id)
            self.waiting.remove(entry)
            self.computing[sequence_id] = [0, entry[2]]
        assert min(self.num_available()) >= 0, "blocks overcommitted"
        for chunk in plan.chunks:
            self.computing[chunk.sequence_id][0] = chunk.end
            if chunk.is_last:
                del self.computing[chunk.sequence_id]
                self.sealed.append((now + taken_after, self.blocks(chunk.end)))
                self.done.append(chunk.sequence_id)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(-2, 2)), max_size=12),
    st.integers(10, 30),
    st.integers(BLOCK, 32),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
)
def test_everybody_that_fits_alone_is_computed(
    arrivals: list[tuple[int, int, int]], pool_blocks: int, budget: int, max_computing: int, taken_after: int, num_homes: int
) -> None:
    limits = PrefillLimits(max_step_tokens=budget, max_computing=max_computing, block_size_tokens=BLOCK)
    worker = Worker(max(pool_blocks, 12) // num_homes * num_homes if num_homes > 1 else pool_blocks, limits, num_homes)
    for now in range(31 + sum(2 + blocks_of(total) + taken_after for _, total, _ in arrivals)):
        for index, (arrives, total, priority) in enumerate(arrivals):
            if arrives == now:
                key = urgency(priority=priority, arrived_s=float(now), priority_weight_s=5.0)
                worker.waiting.append((key, SequenceId(f"r{index}"), total))
        worker.step(now, taken_after)
    assert len(worker.done) == len(arrivals)


def test_a_weak_priority_is_overtaken_only_for_a_bounded_time() -> None:
    weak = urgency(priority=3, arrived_s=0.0, priority_weight_s=2.0)
    assert urgency(priority=0, arrived_s=5.9, priority_weight_s=2.0) < weak
    assert urgency(priority=0, arrived_s=6.1, priority_weight_s=2.0) > weak
