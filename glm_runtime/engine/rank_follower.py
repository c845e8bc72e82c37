"""A rank of a worker that decides nothing: it loads its part, joins its leading rank, and runs every step that it is sent.

Knows: the other side of `rank_group.py`, and when a following rank ends. Does not know requests, peers or the directory: what is drawn
is published by the leading rank alone.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Literal

from glm_runtime.engine.group_messages import (
    Beat,
    Begin,
    Failed,
    GroupMessage,
    Join,
    Loaded,
    Refused,
    Step,
    Stop,
    Transfers,
    Welcome,
    decode,
    encode,
)
from glm_runtime.engine.loaded_model import load_rank, rank_terms
from glm_runtime.engine.plan_codec import PlanDecoder
from glm_runtime.engine.rank_group import RankGroupConfig
from glm_runtime.engine.step_runner import StepRunner
from glm_runtime.engine.worker_config import WorkerIdentity
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.process_groups import join_store, make_context
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.config import WireConfig
from kv_transfer.errors import ConfigError, EngineFault, PeerLost, ProtocolMismatch, TransferTimeout, WorkerLost
from kv_transfer.geometry import rank_peer
from kv_transfer.identity import PeerId, new_incarnation, rank_name
from kv_transfer.link_proof import Party
from kv_transfer.messages import PartyKind
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.rank_link import RankLink, dial_rank
from kv_transfer.rank_transfers import RankTransfers
from kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)

MakeTransport = Callable[[PeerId, PoolMemory], Transport]

LEADER_GRACE_S = 0.5
"""A step that fails here because the leading rank has died fails a moment before that rank's connection ends."""


def join_group(link: RankLink, rank: int, config: RankGroupConfig, *, leader_host: str, host: str) -> ParallelContext:
    """Introduce this rank on a proven connection, and meet the others. Raises ConfigError when refused, PeerLost, TransferTimeout."""
    link.send(encode(Join(rank, config.layout, os.getpid())))
    welcome = _next(link, config.start_timeout_s)
    if not isinstance(welcome, Welcome):
        raise ProtocolMismatch(f"the leading rank says {type(welcome).__name__} where it should welcome this one")
    store = join_store(leader_host, welcome.store_port, config.layout.num_ranks, config.start_timeout_s)
    return make_context(config.layout, rank, store, config.step_timeout_s, host=host)


def wait_for_begin(link: RankLink, timeout_s: float) -> int:
    """Wait until all ranks are loaded and alike; the port for this rank's transfers.

    Raises ConfigError when this rank is not like the others, PeerLost, TransferTimeout.
    """
    message = _next(link, timeout_s)
    if not isinstance(message, Begin):
        raise ProtocolMismatch(f"the leading rank says {type(message).__name__} where it should begin")
    return message.transfers_port


def follow(link: RankLink, runner: StepRunner) -> None:
    """Run what comes until the leading rank says Stop; nothing is published.

    Raises EngineFault when a step fails, which the leading rank is told first, and WorkerLost when that rank is gone.
    """
    decoder = PlanDecoder()
    while not isinstance(message := _next_step(link), Stop):
        try:
            runner.run(decoder.decode(message.plan))
        except Exception as error:
            # Whatever it is: the others wait for this rank in the middle of the step, and no further one can be computed.
            raise _told(link, error) from error


def _next_step(link: RankLink) -> Step | Stop:
    try:
        message = decode(link.receive())
    except PeerLost as error:
        raise WorkerLost(f"the leading rank is gone: {error}") from error
    if not isinstance(message, Step | Stop):
        raise ProtocolMismatch(f"the leading rank says {type(message).__name__} in the middle of steps")
    return message


def _told(link: RankLink, error: Exception) -> EngineFault | WorkerLost:
    """What a failed step is to be called; the leading rank, if it lives, knows by then."""
    reason = f"{type(error).__name__}: {error}"
    try:
        link.send(encode(Failed(reason)))
        link.receive(LEADER_GRACE_S)
    except TransferTimeout:
        pass  # it lives
    except PeerLost:
        return WorkerLost(f"the leading rank is gone; in the middle of a step that shows as {reason}")
    return EngineFault(f"a step failed with {reason}")


def _next(link: RankLink, timeout_s: float) -> GroupMessage:
    message = decode(link.receive(timeout_s))
    if isinstance(message, Refused):
        raise ConfigError(f"the leading rank refuses this one: {message.reason}")
    return message


class FollowerService:
    """One start of one following rank. `run` it once; the requests and `join` come from other threads.

    make_transport: of this rank, under the given name and over its pool. poll_interval_s: pause between two looks at READs in flight.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        role_name: Literal["prefill", "decode"],
        rank: int,
        runtime_config: RuntimeConfig,
        group: RankGroupConfig,
        wire: WireConfig,
        make_transport: MakeTransport,
        poll_interval_s: float,
    ) -> None:
        self._identity = identity
        self._me = Party(PartyKind(role_name), rank_name(identity.worker_id, rank), new_incarnation())
        self._rank = rank
        self._runtime_config = runtime_config
        self._group = group
        self._wire = wire
        self._make_transport = make_transport
        self._poll_interval_s = poll_interval_s
        self._transfers_fault: Exception | None = None
        self._leader: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._link: RankLink | None = None
        self._lock = threading.Lock()

    def join(self, host: str, port: int) -> None:
        """Where the leading rank listens."""
        self._leader.put((host, port))

    def run(self) -> None:
        """Load, follow, and return when the leading rank stops, or after `request_stop`. Raises what ended it otherwise."""
        leader = self._wait_for_leader()
        if leader is None:
            return
        link, party = dial_rank(self._identity.secret, self._me, *leader, self._wire, self._group.start_timeout_s)
        with self._lock:
            self._link = link
            if self._is_stopped.is_set():  # it came between the address and the connection
                link.close()
        try:
            self._serve(link, leader[0], party)
        except PeerLost:
            if not self._is_stopped.is_set():
                raise
        finally:
            self._is_stopped.set()
            link.close()

    def request_stop(self) -> None:
        """End `run`, in the middle of whatever it does: for a start that is not wanted any more. A group that serves is stopped at its
        leading rank.
        """
        self._is_stopped.set()
        self._leader.put(None)
        with self._lock:
            if self._link is not None:
                self._link.close()

    def request_drain(self, deadline_s: float) -> None:
        """Nothing to do: this rank has no requests of its own."""

    def _wait_for_leader(self) -> tuple[str, int] | None:
        try:
            leader = self._leader.get(timeout=self._group.start_timeout_s)
        except queue.Empty:
            raise TransferTimeout(f"nobody said where rank 0 is within {self._group.start_timeout_s:g} s") from None
        return None if self._is_stopped.is_set() else leader

    def _serve(self, link: RankLink, leader_host: str, leader: Party) -> None:
        context = join_group(link, self._rank, self._group, leader_host=leader_host, host=self._identity.host)
        try:
            loaded = load_rank(self._runtime_config, context, leader.incarnation)
        except Exception as error:
            # The leading rank must not wait for what will not come; what it was is this process's to report.
            with contextlib.suppress(PeerLost):
                link.send(encode(Failed(f"{type(error).__name__}: {error}")))
            raise
        link.send(encode(Loaded(rank_terms(loaded.runtime))))
        transfers_port = wait_for_begin(link, self._group.start_timeout_s)
        transfers = self._open_transfers(link, (leader_host, transfers_port), leader, loaded.memory)
        threading.Thread(target=self._beat, args=(link,), name="rank-beat", daemon=True).start()
        logger.info("rank follows worker_id=%s rank=%d layout=%s", self._identity.worker_id, self._rank, self._group.layout.describe())
        try:
            follow(link, loaded.runner)
        except WorkerLost as error:
            if self._transfers_fault is None or isinstance(self._transfers_fault, PeerLost):
                raise
            raise EngineFault(f"the transfers of rank {self._rank} have ended: {self._transfers_fault}") from error
        finally:
            transfers.close()

    def _open_transfers(self, link: RankLink, address: tuple[str, int], leader: Party, memory: PoolMemory) -> RankTransfers:
        """Let the leading rank drive this one's transport, over a connection of its own."""
        frames, _ = dial_rank(self._identity.secret, self._me, *address, self._wire, self._group.start_timeout_s)
        frames.send(encode(Transfers(self._rank)))
        transport = self._make_transport(rank_peer(leader.peer_id, self._rank), memory)

        def on_fault(error: Exception) -> None:
            self._transfers_fault = error
            link.close()  # which ends `follow`: a rank without transfers is of no use

        return RankTransfers(transport, memory, frames, self._poll_interval_s, on_fault)

    def _beat(self, link: RankLink) -> None:
        """Say now and then that this process lives, also while a step computes."""
        with contextlib.suppress(PeerLost):
            while not self._is_stopped.wait(self._wire.ping_interval_s):
                link.send(encode(Beat()))
