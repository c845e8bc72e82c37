"""The prefill scheduler neither starves, overcommits blocks nor exceeds its budget, whatever arrives."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.engine.chunk_plan import PrefillDemand
from kv_transfer.identity import SequenceId
from prefill_worker.scheduler import PrefillLimits, PrefillView, WaitingPrefill, decide, urgency

BLOCK = 4


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def waiting_prefill(sequence_id: str, *, num_tokens: int, num_new_blocks: int) -> WaitingPrefill:
    return WaitingPrefill(sequence_id=SequenceId(sequence_id), num_cached_tokens=0, num_tokens=num_tokens, num_new_blocks=num_new_blocks)


@st.composite
def views(draw: st.DrawFn) -> PrefillView:
    computing = tuple(
        PrefillDemand(sequence_id=SequenceId(f"c{i}"), num_computed_tokens=draw(st.integers(0, 20)), num_tokens=draw(st.integers(21, 40)))
        for i in range(draw(st.integers(0, 3)))
    )
    waiting = tuple(
        waiting_prefill(f"w{i}", num_tokens=draw(st.integers(1, 40)), num_new_blocks=draw(st.integers(0, 10)))
        for i in range(draw(st.integers(0, 5)))
    )
    return PrefillView(computing=computing, waiting=waiting, num_available_blocks=draw(st.integers(0, 20)))


limits = st.builds(PrefillLimits, max_step_tokens=st.integers(BLOCK, 64), max_computing=st.integers(1, 5), block_size_tokens=st.just(BLOCK))


@given(views(), limits)
def test_one_plan_keeps_every_limit(view: PrefillView, limits: PrefillLimits) -> None:
    plan = decide(view, limits)
    taken = {request.sequence_id: request.num_new_blocks for request in view.waiting}
    assert sum(taken[sequence_id] for sequence_id in plan.admit) <= view.num_available_blocks
    assert not plan.admit or len(view.computing) + len(plan.admit) <= limits.max_computing
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= limits.max_step_tokens


@given(views(), limits)
def test_admission_equals_the_longest_prefix_that_fits(view: PrefillView, limits: PrefillLimits) -> None:
    def fits(count: int) -> bool:
        blocks = sum(request.num_new_blocks for request in view.waiting[:count])
        return count == 0 or (blocks <= view.num_available_blocks and len(view.computing) + count <= limits.max_computing)

    best = max(count for count in range(len(view.waiting) + 1) if all(fits(n) for n in range(count + 1)))
    assert decide(view, limits).admit == tuple(request.sequence_id for request in view.waiting[:best])


@dataclass
class Worker:
    """A prefill worker reduced to counters: `pool_blocks` blocks, sealed ones are taken a fixed number of steps later."""

    pool_blocks: int
    limits: PrefillLimits
    waiting: list[tuple[float, SequenceId, int]] = field(default_factory=list)
    computing: dict[SequenceId, list[int]] = field(default_factory=dict)
    sealed: list[tuple[int, int]] = field(default_factory=list)
    done: list[SequenceId] = field(default_factory=list)

    def num_available(self) -> int:
        held = sum(blocks_of(total) for _, total in self.computing.values()) + sum(blocks for _, blocks in self.sealed)
        return self.pool_blocks - held

    def step(self, now: int, taken_after: int) -> None:
        self.sealed = [(until, blocks) for until, blocks in self.sealed if until > now]
        self.waiting.sort()
        view = PrefillView(
            computing=tuple(
                PrefillDemand(sequence_id=sequence_id, num_computed_tokens=done, num_tokens=total)
                for sequence_id, (done, total) in self.computing.items()
            ),
            waiting=tuple(
                waiting_prefill(sequence_id, num_tokens=total, num_new_blocks=blocks_of(total)) for _, sequence_id, total in self.waiting
            ),
            num_available_blocks=self.num_available(),
        )
        plan = decide(view, self.limits)
        for sequence_id in plan.admit:
            entry = next(entry for entry in self.waiting if entry[1] == sequence_id)
            self.waiting.remove(entry)
            self.computing[sequence_id] = [0, entry[2]]
        assert self.num_available() >= 0, "blocks overcommitted"
        for chunk in plan.chunks:
            self.computing[chunk.sequence_id][0] = chunk.end
            if chunk.is_last:
                del self.computing[chunk.sequence_id]
                self.sealed.append((now + taken_after, blocks_of(chunk.end)))
                self.done.append(chunk.sequence_id)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(-2, 2)), max_size=12),
    st.integers(10, 30),
    st.integers(BLOCK, 32),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_everybody_that_fits_alone_is_computed(
    arrivals: list[tuple[int, int, int]], pool_blocks: int, budget: int, max_computing: int, taken_after: int
) -> None:
    worker = Worker(pool_blocks, PrefillLimits(max_step_tokens=budget, max_computing=max_computing, block_size_tokens=BLOCK))
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
