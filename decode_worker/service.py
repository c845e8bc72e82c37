"""A whole decode worker in one process: from the checkpoint to an orderly stop.

Knows: what is started, watched and stopped in which order. Does not know Ray, or who started it.
"""

from collections.abc import Callable

from decode_worker.config import DecodeConfig
from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import Incarnation
from kv_transfer.messages import WorkerAddress


class DecodeService:
    """One start of one decode worker. `run` it once, from a thread that has no event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        runtime_config: RuntimeConfig,
        decode_config: DecodeConfig,
        network: WorkerNetwork,
    ) -> None:
        raise NotImplementedError

    @property
    def incarnation(self) -> Incarnation:
        """The number of this process start, minted by the constructor."""
        raise NotImplementedError

    def run(self, on_serving: Callable[[WorkerAddress], None] | None = None) -> None:
        """Load, serve, and return after `request_stop` or a finished drain; `on_serving` is called once, from this thread.

        Raises ConfigError before anything is served, and EngineFault when a step failed or hung: then let the process exit.
        """
        raise NotImplementedError

    def request_stop(self) -> None:
        """Cancel what runs, tell the peers, close everything, return from `run`. Any thread, any time, often."""
        raise NotImplementedError

    def request_drain(self, deadline_s: float) -> None:
        """Accept nothing new, finish what runs within `deadline_s` seconds, go QUIET. Any thread; DRAIN does the same by message."""
        raise NotImplementedError
