"""reconcile: each rule alone, then its promises over random lives of workers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.observation import ObservedWorker, ask_to_drain, ask_to_stop, begin, does_end_worker, end, hear
from cluster.reconcile import (
    Action,
    DrainWorker,
    GiveUp,
    KillWorker,
    RestartPolicy,
    StartWorker,
    StopWorker,
    backoff_s,
    reconcile,
)
from kv_transfer.identity import WorkerId
from kv_transfer.messages import WorkerState

POLICY = RestartPolicy()
A = WorkerId("prefill-0")
B = WorkerId("decode-0")


def _seen(state: WorkerState, **changes: object) -> ObservedWorker:
    seen = ObservedWorker(worker_id=A, state=state, started_at_s=0.0, heard_at_s=100.0, has_served=True)
    return replace(seen, **changes)  # type: ignore[arg-type]


def _decide(seen: ObservedWorker, now_s: float, *, is_wanted: bool = True) -> list[Action]:
    return reconcile([A] if is_wanted else [], {A: seen}, now_s, POLICY)


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.GONE])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_first_end_of_any_rank_ends_its_worker(state: WorkerState, rank: int) -> None:
    assert does_end_worker(_seen(state), rank)


def test_a_worker_that_was_told_to_stop_ends_with_its_leading_rank() -> None:
    asked = ask_to_stop(_seen(WorkerState.SERVING), 100.0)
    assert [does_end_worker(asked, rank) for rank in (1, 2, 0)] == [False, False, True]


def test_missing_workers_are_all_started_at_once() -> None:
    assert reconcile([A, B], {}, 0.0, POLICY) == [StartWorker(A), StartWorker(B)]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.WARM, WorkerState.SERVING])
def test_a_healthy_worker_is_left_alone(state: WorkerState) -> None:
    assert _decide(_seen(state), 100.0) == []


def test_the_first_restart_is_immediate() -> None:
    assert _decide(_seen(WorkerState.GONE, ended_at_s=100.0, failures=1), 100.0) == [StartWorker(A)]


def test_a_crash_loop_waits_longer_each_time_up_to_the_cap() -> None:
    assert [backoff_s(failures, POLICY) for failures in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert backoff_s(10_000, POLICY) == 30
    seen = _seen(WorkerState.GONE, ended_at_s=100.0, failures=4)
    assert _decide(seen, 103.9) == []
    assert _decide(seen, 104.0) == [StartWorker(A)]


def test_a_worker_that_never_served_is_given_up_on() -> None:
    seen = _seen(WorkerState.GONE, ended_at_s=100.0, failures=3, has_served=False)
    assert _decide(seen, 100.0) == [GiveUp(A, 3)]
    assert _decide(replace(seen, has_served=True), 200.0) == [StartWorker(A)]


def test_a_start_that_takes_too_long_is_stopped() -> None:
    seen = _seen(WorkerState.STARTING, heard_at_s=0.0)
    assert _decide(seen, 179.0) == []
    assert _decide(seen, 180.0) == [StopWorker(A, "not serving 180 s after its start")]


def test_a_silent_worker_is_stopped() -> None:
    assert _decide(_seen(WorkerState.SERVING), 109.9) == []
    assert _decide(_seen(WorkerState.SERVING), 110.0) == [StopWorker(A, "no report for 10 s")]


def test_a_worker_that_does_not_stop_is_killed() -> None:
    seen = _seen(WorkerState.SERVING, stop_asked_at_s=100.0)
    assert _decide(seen, 109.0) == []
    assert _decide(seen, 110.0) == [KillWorker(A, "it did not stop within 10 s")]
    assert _decide(seen, 110.0, is_wanted=False) == [KillWorker(A, "it did not stop within 10 s")]


def test_a_wanted_worker_that_went_quiet_gets_a_new_incarnation() -> None:
    (action,) = _decide(_seen(WorkerState.QUIET), 100.0)
    assert isinstance(action, StopWorker)


def test_a_surplus_worker_drains_before_it_stops() -> None:
    assert _decide(_seen(WorkerState.SERVING), 100.0, is_wanted=False) == [DrainWorker(A)]
    draining = _seen(WorkerState.DRAINING, drain_deadline_s=105.0)
    assert _decide(draining, 104.0, is_wanted=False) == []
    assert _decide(draining, 105.0, is_wanted=False) == [StopWorker(A, "its drain time is over")]
    assert _decide(_seen(WorkerState.DRAINING, drain_deadline_s=900.0), 110.0, is_wanted=False) == [StopWorker(A, "no report for 10 s")]
    assert _decide(_seen(WorkerState.QUIET), 100.0, is_wanted=False) == [StopWorker(A, "it is not wanted any more")]
    assert _decide(_seen(WorkerState.STARTING), 100.0, is_wanted=False) == [StopWorker(A, "it is not wanted any more")]


def test_a_gone_surplus_worker_stays_gone() -> None:
    assert _decide(_seen(WorkerState.GONE, ended_at_s=0.0), 1e6, is_wanted=False) == []


def test_failures_count_up_and_are_forgiven_after_a_stable_time() -> None:
    young = _seen(WorkerState.SERVING, failures=2)
    assert end(young, 60.0, 59.0).failures == 3
    assert end(young, 60.0, 60.0).failures == 1
    assert end(replace(young, stop_asked_at_s=0.5), 60.0, 1.0).failures == 0
    assert end(replace(young, has_served=False), 60.0, 1e6).failures == 3


def test_a_report_does_not_wake_the_dead() -> None:
    dead = end(_seen(WorkerState.SERVING), 60.0, 100.0)
    assert hear(dead, WorkerState.SERVING, 101.0) == dead


STATES = st.sampled_from(list(WorkerState))
TIMES = st.floats(0, 1000, allow_nan=False)
OBSERVED = st.builds(
    ObservedWorker,
    worker_id=st.just(A),
    state=STATES,
    started_at_s=TIMES,
    heard_at_s=TIMES,
    ended_at_s=st.none() | TIMES,
    drain_deadline_s=st.none() | TIMES,
    stop_asked_at_s=st.none() | TIMES,
    failures=st.integers(0, 20),
    has_served=st.booleans(),
)


@given(seen=st.none() | OBSERVED, now_s=TIMES, is_wanted=st.booleans())
def test_what_each_action_needs(seen: ObservedWorker | None, now_s: float, is_wanted: bool) -> None:
    actions = reconcile([A] if is_wanted else [], {} if seen is None else {A: seen}, now_s, POLICY)
    assert len(actions) <= 1, "one worker, one action"
    for action in actions:
        is_alive = seen is not None and seen.state is not WorkerState.GONE
        if isinstance(action, StartWorker):
            assert is_wanted, "only wanted workers are started"
            assert not is_alive, "never two processes of one worker"
        elif isinstance(action, GiveUp):
            assert is_wanted
            assert not is_alive
        else:
            assert is_alive, "a dead process can be neither drained nor stopped"
        if isinstance(action, DrainWorker):
            assert not is_wanted, "nobody drains a wanted worker here"
        if isinstance(action, KillWorker):
            assert seen is not None
            assert seen.stop_asked_at_s is not None, "it is asked to stop first"


class _World:
    """Naive workers that follow actions and whatever the script does to them; time moves by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.observed: dict[WorkerId, ObservedWorker] = {}
        self.starts: dict[WorkerId, list[float]] = {}

    def apply(self, action: Action) -> None:
        seen = self.observed.get(action.worker_id)
        if isinstance(action, StartWorker):
            assert seen is None or seen.state is WorkerState.GONE
            self.starts.setdefault(action.worker_id, []).append(self.now_s)
            self.observed[action.worker_id] = replace(begin(action.worker_id, seen, self.now_s), has_served=True)
            return
        assert seen is not None
        if isinstance(action, DrainWorker):
            self.observed[action.worker_id] = ask_to_drain(seen, self.now_s + 20)
        elif isinstance(action, StopWorker):
            self.observed[action.worker_id] = ask_to_stop(seen, self.now_s)
        elif isinstance(action, KillWorker):
            self.end(action.worker_id)

    def end(self, worker_id: WorkerId) -> None:
        self.observed[worker_id] = end(self.observed[worker_id], POLICY.stable_after_s, self.now_s)

    def tick(self, seconds: float, desired: list[WorkerId]) -> None:
        self.now_s += seconds
        for worker_id, seen in self.observed.items():
            if seen.state is WorkerState.GONE:
                continue
            if seen.stop_asked_at_s is not None and self.now_s - seen.stop_asked_at_s > 2:
                self.end(worker_id)
                continue
            serves = seen.state is WorkerState.PENDING and self.now_s - seen.started_at_s >= 5
            is_quiet = seen.state is WorkerState.DRAINING and self.now_s + 10 >= (seen.drain_deadline_s or 0)
            state = WorkerState.SERVING if serves else WorkerState.QUIET if is_quiet else seen.state
            self.observed[worker_id] = hear(seen, state, self.now_s)
        for action in reconcile(desired, self.observed, self.now_s, POLICY):
            self.apply(action)


EVENTS = st.lists(st.tuples(st.sampled_from(["tick", "crash A", "crash B", "want", "unwant"]), st.floats(0.05, 5)), max_size=40)


@given(events=EVENTS)
@settings(max_examples=150, deadline=None)
def test_after_any_storm_exactly_the_wanted_workers_serve(events: list[tuple[str, float]]) -> None:
    world = _World()
    desired = [A, B]
    for event, seconds in events:
        if event.startswith("crash"):
            worker_id = A if event.endswith("A") else B
            seen = world.observed.get(worker_id)
            if seen is not None and seen.state is not WorkerState.GONE:
                world.end(worker_id)
        elif event == "want":
            desired = [A, B]
        elif event == "unwant":
            desired = [A]
        world.tick(seconds, desired)
    for _ in range(200):
        world.tick(0.5, desired)
    serving = {worker_id for worker_id, seen in world.observed.items() if seen.state is WorkerState.SERVING}
    assert serving == set(desired)
    assert reconcile(desired, world.observed, world.now_s, POLICY) == [], "nothing left to do"


@given(crash_after_s=st.floats(0.05, 4))
def test_a_crash_loop_never_restarts_faster_than_the_back_off(crash_after_s: float) -> None:
    world = _World()
    for _ in range(400):
        world.tick(0.1, [A])
        seen = world.observed[A]
        if seen.state is not WorkerState.GONE and world.now_s - seen.started_at_s >= crash_after_s:
            world.end(A)
    gaps = [later - earlier for earlier, later in zip(world.starts[A], world.starts[A][1:], strict=False)]
    for number, gap in enumerate(gaps, start=1):
        assert gap >= backoff_s(number, POLICY)
