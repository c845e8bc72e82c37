"""What a worker's process is told, and how its service is made from it. No Ray; torch comes with the service only."""

import json
import logging.config
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster.config import ServeConfig
from cluster.placement import Role
from kv_transfer.errors import ConfigError
from kv_transfer.identity import WorkerId

if TYPE_CHECKING:
    from glm_runtime.engine.worker_config import WorkerIdentity


class WorkerService(Protocol):
    """What the services of all ranks have in common. `run` blocks; the two requests come from other threads, at any time."""

    def run(self) -> None: ...

    def request_stop(self) -> None: ...

    def request_drain(self, deadline_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One start of one rank of a worker. The secret itself stays in its file: what is sent through Ray can be logged by Ray."""

    worker_id: WorkerId
    role: Role
    rank: int
    config: ServeConfig
    directory_host: str
    directory_port: int
    secret_path: str
    log_file: str
    logging_config_file: str


class LeadingService(WorkerService, Protocol):
    """The service of a worker's rank 0."""

    @property
    def group_address(self) -> tuple[str, int] | None:
        """Where the other ranks connect to; None where there are none. Known from the start."""


class FollowingService(WorkerService, Protocol):
    """The service of any other rank."""

    def join(self, host: str, port: int) -> None:
        """Where rank 0 listens. Any thread; may come before `run`."""


def make_leading_service(spec: WorkerSpec) -> LeadingService:
    """The service of a worker's rank 0, which is the worker for everybody else. Imports torch; raises ConfigError and OSError."""
    from glm_runtime.engine.worker_config import WorkerNetwork

    config = spec.config
    network = WorkerNetwork(wire=config.wire, timers=config.timers, transport=config.transport)
    runtime, start_timeout_s = config.runtime_of(spec.role), config.cluster.restart.start_timeout_s
    if spec.role == "prefill":
        from prefill_worker.service import PrefillService

        return PrefillService(_identity(spec), runtime, config.prefill, network, start_timeout_s=start_timeout_s)
    from decode_worker.service import DecodeService

    return DecodeService(_identity(spec), runtime, config.decode, network, start_timeout_s=start_timeout_s)


def make_following_service(spec: WorkerSpec) -> FollowingService:
    """The service of any other rank. Imports torch; raises ConfigError and OSError."""
    from glm_runtime.engine.rank_follower import FollowerService
    from glm_runtime.engine.rank_group import RankGroupConfig
    from kv_transfer.transports.nixl import NixlTransport

    config = spec.config
    runtime = config.runtime_of(spec.role)
    group = RankGroupConfig(
        layout=runtime.parallel,
        step_timeout_s=(config.prefill if spec.role == "prefill" else config.decode).step_timeout_s,
        start_timeout_s=config.cluster.restart.start_timeout_s,
    )
    return FollowerService(
        _identity(spec),
        spec.role,
        spec.rank,
        runtime,
        group,
        config.wire,
        lambda me, memory: NixlTransport(me, memory, config.transport),
        config.transport.poll_interval_s,
    )


def _identity(spec: WorkerSpec) -> "WorkerIdentity":
    from glm_runtime.engine.worker_config import WorkerIdentity

    return WorkerIdentity(
        worker_id=spec.worker_id,
        host=spec.config.cluster.worker_host,
        directory_host=spec.directory_host,
        directory_port=spec.directory_port,
        secret=Path(spec.secret_path).read_bytes(),
    )


def configure_logging(path: Path) -> None:
    """Set logging up from a JSON file with a logging.config dictionary. Raises ConfigError naming the file."""
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"is no logging configuration: {error}", path=str(path)) from None
