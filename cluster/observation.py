"""What is known of each worker's process, as values that change only by what was seen. Pure: times are arguments."""

from dataclasses import dataclass, replace

from kv_transfer.identity import WorkerId
from kv_transfer.messages import WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """A worker's present (or, when GONE, last) process.

    started_at_s: when its process was started. heard_at_s: its last report, or started_at_s before the first one.
    ended_at_s: when it was seen dead. stop_asked_at_s: when it was told to stop. drain_deadline_s: set while DRAINING.
    failures: ends in a row that nobody asked for. has_served: whether any process of this worker ever served.
    """

    worker_id: WorkerId
    state: WorkerState
    started_at_s: float
    heard_at_s: float
    ended_at_s: float | None = None
    drain_deadline_s: float | None = None
    stop_asked_at_s: float | None = None
    failures: int = 0
    has_served: bool = False


def begin(worker_id: WorkerId, previous: ObservedWorker | None, now_s: float) -> ObservedWorker:
    """A process of this worker has just been started; failures of the ones before it are remembered."""
    return ObservedWorker(
        worker_id=worker_id,
        state=WorkerState.PENDING,
        started_at_s=now_s,
        heard_at_s=now_s,
        failures=previous.failures if previous else 0,
        has_served=previous.has_served if previous else False,
    )


def hear(seen: ObservedWorker, state: WorkerState, now_s: float) -> ObservedWorker:
    """It has reported. What is GONE stays so: a report can be older than the death notice."""
    if seen.state is WorkerState.GONE:
        return seen
    return replace(seen, state=state, heard_at_s=now_s, has_served=seen.has_served or state is WorkerState.SERVING)


def ask_to_drain(seen: ObservedWorker, deadline_s: float) -> ObservedWorker:
    """It was told to drain until `deadline_s`; it will say so itself, this only keeps it from being told again."""
    return replace(seen, state=WorkerState.DRAINING, drain_deadline_s=deadline_s)


def ask_to_stop(seen: ObservedWorker, now_s: float) -> ObservedWorker:
    """It was told to stop."""
    return replace(seen, stop_asked_at_s=now_s)


def end(seen: ObservedWorker, stable_after_s: float, now_s: float) -> ObservedWorker:
    """Its process is dead. Failures in a row: none when it was asked to end, one when it had served for `stable_after_s`."""
    if seen.stop_asked_at_s is not None:
        failures = 0
    else:
        is_stable = seen.has_served and now_s - seen.started_at_s >= stable_after_s
        failures = 1 if is_stable else seen.failures + 1
    return replace(seen, state=WorkerState.GONE, ended_at_s=now_s, failures=failures, stop_asked_at_s=None, drain_deadline_s=None)


def does_end_worker(seen: ObservedWorker, rank: int) -> bool:
    """Whether the end of this rank's process is the end of its worker, of which no rank has ended so far.

    The first end of any rank is: the others cannot compute without it. One that was told to stop tells its ranks itself and has
    something to close when they have ended: then it is rank 0's end that counts.
    """
    return rank == 0 or seen.stop_asked_at_s is None
