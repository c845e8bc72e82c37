"""What a worker's process is told, and how its service is made from it. No Ray; torch comes with the service only."""

import json
import logging.config
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.config import ServeConfig
from cluster.placement import Role
from kv_transfer.errors import ConfigError
from kv_transfer.identity import WorkerId


class WorkerService(Protocol):
    """What prefill and decode services have in common. `run` blocks; the two requests come from other threads, at any time."""

    def run(self) -> None: ...

    def request_stop(self) -> None: ...

    def request_drain(self, deadline_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One worker's start. The secret itself stays in its file: what is sent through Ray can be logged by Ray."""

    worker_id: WorkerId
    role: Role
    config: ServeConfig
    directory_host: str
    directory_port: int
    secret_path: str
    log_file: str
    logging_config_file: str


def make_service(spec: WorkerSpec) -> WorkerService:
    """The service of this role. Imports torch; raises ConfigError and OSError."""
    from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork

    config = spec.config
    identity = WorkerIdentity(
        worker_id=spec.worker_id,
        host=config.cluster.worker_host,
        directory_host=spec.directory_host,
        directory_port=spec.directory_port,
        secret=Path(spec.secret_path).read_bytes(),
    )
    network = WorkerNetwork(wire=config.wire, timers=config.timers, transport=config.transport)
    if spec.role == "prefill":
        from prefill_worker.service import PrefillService

        return PrefillService(identity, config.runtime, config.prefill, network)
    from decode_worker.service import DecodeService

    return DecodeService(identity, config.runtime, config.decode, network)


def configure_logging(path: Path) -> None:
    """Set logging up from a JSON file with a logging.config dictionary. Raises ConfigError naming the file."""
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"is no logging configuration: {error}", path=str(path)) from None
