"""A whole decode worker in one process: from the checkpoint to an orderly stop.

Knows: how a decode worker's role is put into the shell that both workers share. Does not know Ray, or who started it.
"""

from collections.abc import Callable

from decode_worker.config import DecodeConfig
from decode_worker.role import DecodeRole
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
from glm_runtime.engine.worker_role import Outside
from glm_runtime.engine.worker_shell import DEFAULT_START_TIMEOUT_S, ShellTiming, WorkerShell
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import Incarnation
from kv_transfer.link import Party
from kv_transfer.messages import WorkerAddress
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.nixl import NixlTransport


class DecodeService:
    """One start of one decode worker, or of its leading rank. `run` it once, from a thread that has no event loop.

    start_timeout_s: how long the worker's other ranks may take to come, and then to load.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        runtime_config: RuntimeConfig,
        decode_config: DecodeConfig,
        network: WorkerNetwork,
        *,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
    ) -> None:
        def make_role(model: LoadedModel, outside: Outside, me: Party) -> DecodeRole:
            own = NixlTransport(me.peer_id, model.memory, network.transport)
            transport = GroupTransport.of_worker(own, model.memory, model.sharding, model.rank_links, network.transport.rank_timeout_s)
            return DecodeRole(model, outside, me, decode_config, network, transport)

        timing = ShellTiming(
            tick_interval_s=decode_config.tick_interval_s,
            step_timeout_s=decode_config.step_timeout_s,
            stop_timeout_s=decode_config.stop_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._shell = WorkerShell(identity, "decode", runtime_config, network, timing, make_role)

    @property
    def incarnation(self) -> Incarnation:
        """The number of this process start, minted by the constructor."""
        return self._shell.me.incarnation

    @property
    def group_address(self) -> tuple[str, int] | None:
        """Where the worker's other ranks connect to; None where `RuntimeConfig.parallel` has one rank."""
        return self._shell.group_address

    def run(self, on_serving: Callable[[WorkerAddress], None] | None = None) -> None:
        """Load, serve, and return after `request_stop`; `on_serving` is called once, from this thread.

        Raises ConfigError before anything is served, and EngineFault when a step failed or hung: then let the process exit.
        """
        self._shell.run(on_serving)

    def request_stop(self) -> None:
        """Fail what runs as retryable elsewhere, close everything, return from `run`. Any thread, any time, often."""
        self._shell.request_stop()

    def request_drain(self, deadline_s: float) -> None:
        """Accept nothing new, finish what runs within `deadline_s` seconds, be QUIET until stopped. Any thread; DRAIN does the same."""
        self._shell.request_drain(deadline_s)
