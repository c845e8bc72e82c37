"""All workers of the cluster: carries out what `reconcile` decides, and turns reports and deaths into observations.

A worker is its ranks: they are started together, rank 0 is told what all are told, and the first end of any rank ends all.
Knows: actors, their placement groups, what was last seen of each worker. Does not decide (`reconcile.py`) and knows no gateway.
Everything runs on the supervisor's loop, except Ray's calls, which run one after the other on the Ray thread.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import observation
from cluster.config import ServeConfig
from cluster.observation import ObservedWorker, does_end_worker
from cluster.placement import GroupPlan
from cluster.reconcile import Action, DrainWorker, GiveUp, KillWorker, StartWorker, StopWorker, reconcile
from cluster.worker_spec import WorkerSpec
from kv_transfer.errors import ConfigError, WorkerError
from kv_transfer.identity import WorkerId
from kv_transfer.messages import WorkerEntry, WorkerState

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from cluster.actors import RunningWorker

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
KILL_GRACE_S = 5.0
LOG_TAIL_LINES = 12

RayCall = Callable[..., Awaitable[Any]]
"""Runs a function with arguments on the Ray thread."""


class StartFailed(WorkerError):
    """A worker cannot be started here."""

    code = "start_failed"


class WorkerFleet:
    """`desired` is what there should be; `tick` brings it about, one step at a time.

    make_spec: of one rank of a plan. on_gone: told at once when a process of a worker is dead. tell: one line for the person at the
    terminal.
    """

    def __init__(
        self,
        config: ServeConfig,
        plans: Sequence[GroupPlan],
        make_spec: Callable[[GroupPlan, int], WorkerSpec],
        call_ray: RayCall,
        on_gone: Callable[[WorkerId], None],
        tell: Callable[[str], None],
    ) -> None:
        self.desired = [plan.worker_id for plan in plans]
        self._config = config
        self._plans = {plan.worker_id: plan for plan in plans}
        self._make_spec = make_spec
        self._call_ray = call_ray
        self._on_gone = on_gone
        self._tell = tell
        self._groups: Mapping[WorkerId, PlacementGroup] = {}
        self._workers: dict[WorkerId, RunningWorker] = {}
        self._ended: list[RunningWorker] = []
        self._ended_rank: dict[WorkerId, int] = {}
        self._observed: dict[WorkerId, ObservedWorker] = {}
        self.changed = asyncio.Event()

    @property
    def observed(self) -> Mapping[WorkerId, ObservedWorker]:
        """What is known of each worker."""
        return self._observed

    @property
    def missing(self) -> list[WorkerId]:
        """Desired workers that do not serve."""
        return [worker_id for worker_id in self.desired if self._state(worker_id) is not WorkerState.SERVING]

    async def place(self) -> None:
        """Reserve every worker's placement group. Raises ConfigError."""
        from cluster.actors import place_groups

        self._groups = await self._call_ray(place_groups, list(self._plans.values()), PLACEMENT_TIMEOUT_S)

    async def tick(self) -> None:
        """Do what is due now. Raises StartFailed when a worker that never served has failed too often."""
        await self._end_processes()
        for action in reconcile(self.desired, self._observed, time.monotonic(), self._config.cluster.restart):
            await self._carry_out(action)

    def hear(self, entry: WorkerEntry, now_s: float) -> None:
        """A worker has reported."""
        worker_id = entry.address.worker_id
        before = self._observed.get(worker_id)
        if before is None or before.state is WorkerState.GONE:
            return
        after = observation.hear(before, entry.state, now_s)
        self._observed[worker_id] = after
        if after.state is not before.state:
            since_start_s = now_s - after.started_at_s
            self._tell(f"{worker_id} is {entry.state.value} (pid {entry.pid}, {since_start_s:.1f} s after its start)")
            logger.info("worker state changed worker_id=%s state=%s pid=%s", worker_id, entry.state.value, entry.pid)
            self.changed.set()

    async def stop_all(self, grace_s: float, hurry: asyncio.Event) -> list[WorkerId]:
        """Stop every worker, kill those that have not ended after `grace_s` or once `hurry` is set. Returns the killed ones."""
        self.desired = []
        for worker_id in list(self._workers):
            await self._stop(worker_id)
        await self._wait_for_ends(grace_s, hurry)
        late = list(self._workers)
        for worker_id in late:
            await self._kill(worker_id)
        await self._end_processes()
        await self._wait_for_ends(KILL_GRACE_S, asyncio.Event())
        return late

    async def _wait_for_ends(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Until no worker runs, `grace_s` is over or `hurry` is set; whoever sets it sets `changed` as well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not hurry.is_set() and self._workers:
                    self.changed.clear()
                    await self.changed.wait()

    def _state(self, worker_id: WorkerId) -> WorkerState | None:
        seen = self._observed.get(worker_id)
        return None if seen is None else seen.state

    async def _carry_out(self, action: Action) -> None:
        worker_id = action.worker_id
        if isinstance(action, StartWorker):
            await self._start(worker_id)
        elif isinstance(action, DrainWorker):
            drain_s = self._config.timers.drain_cap_s
            self._observed[worker_id] = observation.ask_to_drain(self._observed[worker_id], time.monotonic() + drain_s)
            await self._call_ray(self._workers[worker_id].leader.drain.remote, drain_s)
        elif isinstance(action, StopWorker):
            logger.warning("worker is stopped worker_id=%s reason=%s", worker_id, action.reason)
            self._tell(f"{worker_id} is stopped: {action.reason}")
            await self._stop(worker_id)
        elif isinstance(action, KillWorker):
            logger.warning("worker is killed worker_id=%s reason=%s", worker_id, action.reason)
            await self._kill(worker_id)
        elif isinstance(action, GiveUp):
            raise StartFailed(f"{worker_id} failed {action.failures} times to start.\n{self._tail(worker_id)}", worker_id=worker_id)

    async def _start(self, worker_id: WorkerId) -> None:
        from cluster.actors import start_worker

        plan = self._plans[worker_id]
        specs = [self._make_spec(plan, rank) for rank in range(len(plan.bundles))]
        self._observed[worker_id] = observation.begin(worker_id, self._observed.get(worker_id), time.monotonic())
        worker: RunningWorker = await self._call_ray(start_worker, specs, self._groups[worker_id])
        self._workers[worker_id] = worker
        for rank in range(len(worker.ranks)):
            self._watch(worker_id, worker, rank)

    def _watch(self, worker_id: WorkerId, worker: "RunningWorker", rank: int) -> None:
        loop = asyncio.get_running_loop()
        ended = worker.ranks[rank].ended
        ended.add_done_callback(lambda future: loop.call_soon_threadsafe(self._take_end, worker_id, worker, rank, future))

    async def _stop(self, worker_id: WorkerId) -> None:
        self._observed[worker_id] = observation.ask_to_stop(self._observed[worker_id], time.monotonic())
        await self._call_ray(self._workers[worker_id].leader.stop.remote)

    async def _kill(self, worker_id: WorkerId) -> None:
        from cluster.actors import kill_worker

        await self._call_ray(kill_worker, self._workers[worker_id])

    async def _end_processes(self) -> None:
        """End the processes of workers that have ended: what they still hold must not outlive their incarnation."""
        from cluster.actors import kill_worker

        ended, self._ended = self._ended, []
        for worker in ended:
            await self._call_ray(kill_worker, worker)

    def _take_end(self, worker_id: WorkerId, worker: "RunningWorker", rank: int, future: Any) -> None:
        """The parked call of a rank has returned: its service or its whole process has ended, 10 to 20 ms ago."""
        seen = self._observed[worker_id]
        if self._workers.get(worker_id) is not worker or not does_end_worker(seen, rank):
            return
        # From here on the ends of its other ranks are nobody's: the next start may have begun before they come.
        del self._workers[worker_id]
        self._ended.append(worker)
        self.changed.set()
        now_s = time.monotonic()
        self._observed[worker_id] = observation.end(seen, self._config.cluster.restart.stable_after_s, now_s)
        self._ended_rank[worker_id] = rank
        self._on_gone(worker_id)
        if seen.stop_asked_at_s is not None:
            logger.info("worker ended worker_id=%s", worker_id)
        else:
            reason = describe_end(future.exception())
            failures = self._observed[worker_id].failures
            logger.warning("worker lost worker_id=%s rank=%d failures=%s reason=%s", worker_id, rank, failures, reason)
            name = f"{worker_id} (by rank {rank})" if len(worker.ranks) > 1 else worker_id
            self._tell(f"{name} is gone: {reason}; its log: {self._log_file(worker_id)}")

    def _log_file(self, worker_id: WorkerId) -> Path:
        """Of the rank that ended it last."""
        return Path(self._make_spec(self._plans[worker_id], self._ended_rank.get(worker_id, 0)).log_file)

    def _tail(self, worker_id: WorkerId) -> str:
        log_file = self._log_file(worker_id)
        try:
            lines = log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return "\n".join([f"The end of {log_file}:", *(f"  {line}" for line in lines)])


def describe_end(error: BaseException | None) -> str:
    """One line about why a worker has ended, from what its parked call gave."""
    if error is None:
        return "its service has ended"
    cause = getattr(error, "cause", None) or error
    if type(cause).__name__ == "ActorDiedError":
        return "its process has died"
    if isinstance(cause, ConfigError):
        return str(cause)
    first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first_line}" if first_line else type(cause).__name__
