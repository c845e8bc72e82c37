"""What to do next so that the workers there are become the workers there should be. Pure: `reconcile(desired, observed, now_s)`.

Knows: when a worker is started, restarted after a back-off, drained, stopped or killed. Does not know Ray, sockets or clocks;
`supervisor.py` gathers the observations and carries the actions out. Calling it again with the same input gives the same
actions, so an action whose effect is not visible yet must be visible in the observation (`stop_asked_at_s`, state DRAINING).

         absent --Start--> STARTING/WARM/SERVING --Drain--> DRAINING --> QUIET --Stop--> GONE --Start (back-off)--> ...
                                 `-- silent, too slow to start: Stop, then Kill after a grace --^
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.observation import ObservedWorker
from kv_transfer.identity import WorkerId
from kv_transfer.messages import WorkerState

UNDER_WAY = frozenset({WorkerState.PENDING, WorkerState.STARTING, WorkerState.WARM})
"""States of a worker that has been started and does not serve yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a worker is given up on and how soon the next one is started in its place.

    start_timeout_s: from start to SERVING. silence_timeout_s: between two reports (an engine that hangs ends its process by
    itself). stop_grace_s: from asking a worker to stop to killing it. backoff_base_s, backoff_cap_s: the first restart is
    immediate, the n-th waits base * 2^(n-2) up to the cap. stable_after_s: a worker that has served that long has its failures
    forgiven. max_failed_starts: so many failures of a worker that never served end a start-up.
    """

    start_timeout_s: float = 180.0
    silence_timeout_s: float = 10.0
    stop_grace_s: float = 10.0
    backoff_base_s: float = 1.0
    backoff_cap_s: float = 30.0
    stable_after_s: float = 60.0
    max_failed_starts: int = 3


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process for this worker, in its own placement group, under a new incarnation."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Ask it to accept nothing new and finish what it has."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Ask it to end now; what it holds is lost."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """It did not end when asked."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This worker cannot be started here; a start-up ends with that."""

    worker_id: WorkerId
    failures: int


Action = StartWorker | DrainWorker | StopWorker | KillWorker | GiveUp


def backoff_s(failures: int, policy: RestartPolicy) -> float:
    """Seconds between a worker's end and its next start, after so many failures in a row."""
    if failures <= 1:
        return 0.0
    return min(policy.backoff_cap_s, policy.backoff_base_s * 2.0 ** min(failures - 2, 62))


def reconcile(
    desired: Sequence[WorkerId], observed: Mapping[WorkerId, ObservedWorker], now_s: float, policy: RestartPolicy
) -> list[Action]:
    """The actions that are due now, at most one per worker, the desired ones first and in their order."""
    wanted = set(desired)
    surplus = [worker_id for worker_id in sorted(observed) if worker_id not in wanted]
    actions = [_for_desired(worker_id, observed.get(worker_id), now_s, policy) for worker_id in desired]
    actions += [_for_surplus(observed[worker_id], now_s, policy) for worker_id in surplus]
    return [action for action in actions if action is not None]


def _for_desired(worker_id: WorkerId, seen: ObservedWorker | None, now_s: float, policy: RestartPolicy) -> Action | None:
    if seen is None:
        return StartWorker(worker_id)
    if seen.state is WorkerState.GONE:
        return _restart(seen, now_s, policy)
    if seen.stop_asked_at_s is not None:
        return _kill_when_late(seen, seen.stop_asked_at_s, now_s, policy)
    if seen.state is WorkerState.QUIET:
        return StopWorker(worker_id, "it has drained and is wanted again: a new incarnation starts")
    reason = _what_is_wrong(seen, now_s, policy)
    return StopWorker(worker_id, reason) if reason else None


def _for_surplus(seen: ObservedWorker, now_s: float, policy: RestartPolicy) -> Action | None:
    if seen.state is WorkerState.GONE:
        return None
    if seen.stop_asked_at_s is not None:
        return _kill_when_late(seen, seen.stop_asked_at_s, now_s, policy)
    if seen.state is WorkerState.SERVING:
        return DrainWorker(seen.worker_id)
    if seen.state is WorkerState.DRAINING:
        is_late = seen.drain_deadline_s is not None and now_s >= seen.drain_deadline_s
        reason = "its drain time is over" if is_late else _what_is_wrong(seen, now_s, policy)
        return StopWorker(seen.worker_id, reason) if reason else None
    return StopWorker(seen.worker_id, "it is not wanted any more")


def _restart(seen: ObservedWorker, now_s: float, policy: RestartPolicy) -> Action | None:
    if not seen.has_served and seen.failures >= policy.max_failed_starts:
        return GiveUp(seen.worker_id, seen.failures)
    ended_at_s = seen.started_at_s if seen.ended_at_s is None else seen.ended_at_s
    is_due = now_s >= ended_at_s + backoff_s(seen.failures, policy)
    return StartWorker(seen.worker_id) if is_due else None


def _kill_when_late(seen: ObservedWorker, asked_at_s: float, now_s: float, policy: RestartPolicy) -> Action | None:
    is_late = now_s - asked_at_s >= policy.stop_grace_s
    return KillWorker(seen.worker_id, f"it did not stop within {policy.stop_grace_s:g} s") if is_late else None


def _what_is_wrong(seen: ObservedWorker, now_s: float, policy: RestartPolicy) -> str | None:
    """Why a worker should be replaced, or None. Before SERVING only the start timer counts: loading weights may hold up reports."""
    if seen.state in UNDER_WAY:
        is_late = now_s - seen.started_at_s >= policy.start_timeout_s
        return f"not serving {policy.start_timeout_s:g} s after its start" if is_late else None
    if now_s - seen.heard_at_s >= policy.silence_timeout_s:
        return f"no report for {policy.silence_timeout_s:g} s"
    return None
