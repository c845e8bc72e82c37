"""Workers as Ray actors: the only module with `ray.remote`, and all that the rest of the cluster asks of Ray for a worker.

Ray carries placement, life-cycle and death notices only; no Ray call is on the path of a request, a step or a token. Importing
this module imports Ray, so the supervisor does it late, on its Ray thread, after `ray_session.set_ray_environment`.
"""

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import GroupPlan
from cluster.process_tree import die_with_parent
from cluster.worker_spec import WorkerService, WorkerSpec, configure_logging, make_following_service, make_leading_service
from kv_transfer.errors import ConfigError
from kv_transfer.identity import WorkerId

CONCURRENT_CALLS = 4
"""park() occupies one thread for the actor's whole life, group_address() one for a while; stop() and drain() must get through."""


class RankActor:
    """One rank's process. It hosts the service in a thread of its own; every method returns at once, except those that say otherwise."""

    def __init__(self, spec: WorkerSpec) -> None:
        die_with_parent(os.getppid())  # the raylet; Ray's own check asks whether pid 1 has adopted it, which need not be so
        _write_output_to(Path(spec.log_file))
        configure_logging(Path(spec.logging_config_file))
        self._spec = spec
        self._service: WorkerService | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        self._address: Future[tuple[str, int] | None] = Future()
        self._leader: Future[tuple[str, int]] = Future()
        self._outcome: Future[None] = Future()
        threading.Thread(target=self._host, name="worker-service", daemon=True).start()

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def park(self) -> None:
        """Return when the service has ended, or raise what ended it. Its caller also learns at once when this process dies."""
        self._outcome.result()

    def group_address(self) -> tuple[str, int] | None:
        """Rank 0: where the other ranks connect to. Blocks until it listens."""
        return self._address.result()

    def join(self, address: tuple[str, int]) -> None:
        """Another rank: where rank 0 listens."""
        self._leader.set_result(address)

    def drain(self, deadline_s: float) -> None:
        """Accept nothing new, finish within `deadline_s`."""
        with self._lock:
            if self._service is not None:
                self._service.request_drain(deadline_s)

    def stop(self) -> None:
        """End the service; park() returns then. Also before it has come up."""
        with self._lock:
            self._is_stopped = True
            if self._service is not None:
                self._service.request_stop()

    def _host(self) -> None:
        try:
            service = self._make_service()
            with self._lock:
                self._service = service
                if self._is_stopped:
                    service.request_stop()
            service.run()
        except BaseException as error:
            # The boundary of this process: whatever ended the service goes to its log and, through park(), to the supervisor.
            logging.getLogger(__name__).exception("rank ended worker_id=%s rank=%d", self._spec.worker_id, self._spec.rank)
            self._outcome.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            self._outcome.set_result(None)

    def _make_service(self) -> WorkerService:
        if self._spec.rank == 0:
            leading = make_leading_service(self._spec)
            self._address.set_result(leading.group_address)
            return leading
        following = make_following_service(self._spec)
        self._leader.add_done_callback(lambda found: following.join(*found.result()))
        return following


@dataclass(frozen=True, slots=True)
class RunningRank:
    """A started actor and the future that completes when its service or its process has ended."""

    handle: Any
    ended: "Future[Any]"


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """The actors of one start of a worker, in order of ranks."""

    ranks: tuple[RunningRank, ...]

    @property
    def leader(self) -> Any:
        """Rank 0's actor, which is told to drain and to stop for all."""
        return self.ranks[0].handle


def place_groups(plans: Sequence[GroupPlan], timeout_s: float) -> Mapping[WorkerId, PlacementGroup]:
    """Reserve all groups together. Raises ConfigError naming the first one that Ray cannot place within `timeout_s`."""
    groups = {plan.worker_id: placement_group([dict(bundle) for bundle in plan.bundles], strategy=plan.strategy) for plan in plans}
    for plan in plans:
        if not groups[plan.worker_id].wait(timeout_s):
            raise ConfigError(f"Ray could not place {plan.worker_id} ({list(plan.bundles)}) within {timeout_s:g} s", path="cluster")
    return groups


def start_worker(specs: Sequence[WorkerSpec], group: PlacementGroup) -> RunningWorker:
    """Start the processes of all ranks of a worker in its group; returns before they are there. specs: in order of ranks.

    Rank 0's address goes to the others by Ray, once it is known; if it never is, they end with rank 0.
    """
    ranks = tuple(_start_rank(spec, group) for spec in specs)
    if len(ranks) > 1:
        address = ranks[0].handle.group_address.remote()
        for rank in ranks[1:]:
            rank.handle.join.remote(address)
    return RunningWorker(ranks)


def _start_rank(spec: WorkerSpec, group: PlacementGroup) -> RunningRank:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=spec.rank)
    actor_class: Any = ray.remote(RankActor)
    handle = actor_class.options(
        num_cpus=group.bundle_specs[spec.rank]["CPU"],
        scheduling_strategy=strategy,
        max_concurrency=CONCURRENT_CALLS,
        max_restarts=0,  # Ray would restart it under the supervisor's nose, in the middle of its peers' transfers
        max_task_retries=0,
    ).remote(spec)
    return RunningRank(handle, handle.park.remote().future())


def kill_worker(worker: RunningWorker) -> None:
    """End the processes of all its ranks now."""
    for rank in worker.ranks:
        ray.kill(rank.handle, no_restart=True)


def _write_output_to(log_file: Path) -> None:
    """Send this process's stdout and stderr to its log, native crashes included."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
