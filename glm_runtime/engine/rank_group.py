"""The ranks of one worker as its leading rank sees them: they join, are compared, run every step, and end together.

    join     HELLO, rank and layout -> all make their groups -> all load -> what must be equal is compared
    run      the plan goes to the others, then this rank runs it; inside the step the ranks meet in collectives only
    end      Stop to the others; or the first rank that is lost, late or failed ends all: EngineFault with its number and why

Knows: who is there and what each said last. Does not know how a rank follows (`rank_follower.py`) or who starts its process again.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from glm_runtime.engine.group_messages import (
    Beat,
    Begin,
    Failed,
    GroupMessage,
    Join,
    Loaded,
    RankTerms,
    Refused,
    Step,
    Stop,
    Transfers,
    Welcome,
    decode,
    encode,
)
from glm_runtime.engine.plan_codec import PlanEncoder
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.step_runner import StepRunner
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.process_groups import make_context, serve_store
from kv_transfer.config import WireConfig
from kv_transfer.errors import ConfigError, EngineFault, PeerLost, ServingError, TransferTimeout
from kv_transfer.identity import rank_name
from kv_transfer.link_proof import Party, Role
from kv_transfer.rank_link import RankLink, RankListener

logger = logging.getLogger(__name__)

REASON_GRACE_S = 1.0
"""A step that fails here has often failed because of another rank: what that one says, or its end, is on its way."""
FAREWELL_S = 1.0
LATE_BEATS = 1.5
"""A look that comes later than this many intervals was held up in our own process; the excess is not the other rank's silence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroupConfig:
    """The ranks of one worker. step_timeout_s: of one exchange within a step. start_timeout_s: until all have joined, and then until
    all are loaded.
    """

    layout: ParallelLayout
    step_timeout_s: float
    start_timeout_s: float


class RankWatch:
    """A thread that hears the other ranks: their ends, at once; what they say before; their silence.

    on_fault: called once, on that thread. fault: what ended the group.
    """

    def __init__(self, worker_id: str, links: Mapping[int, RankLink], wire: WireConfig, on_fault: Callable[[EngineFault], None]) -> None:
        self.fault: EngineFault | None = None
        self._worker_id = worker_id
        self._links = links
        self._wire = wire
        self._on_fault = on_fault
        self._is_over = threading.Event()
        self._waking = os.eventfd(0)
        self._is_stopped = False
        self._silence_s = dict.fromkeys(links, 0.0)
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def wait_for_fault(self, timeout_s: float) -> EngineFault | None:
        """The fault, if there is one or comes within the time."""
        self._is_over.wait(timeout_s)
        return self.fault

    def stop(self) -> None:
        """Hear nobody any more: what comes now is no fault. By one thread, often."""
        self._is_over.set()
        if self._is_stopped:
            return
        self._is_stopped = True
        os.eventfd_write(self._waking, 1)
        self._thread.join()
        os.close(self._waking)

    def _watch(self) -> None:
        readable = select.poll()
        readable.register(self._waking, select.POLLIN)
        for link in self._links.values():
            readable.register(link.fileno(), select.POLLIN)
        seen_s = time.monotonic()
        while not self._is_over.is_set():
            ready = {descriptor for descriptor, _ in readable.poll(1000 * self._wire.ping_interval_s)}
            now_s = time.monotonic()
            past_s, seen_s = min(now_s - seen_s, LATE_BEATS * self._wire.ping_interval_s), now_s
            for rank, link in self._links.items():
                reason = self._hear(rank, past_s, is_ready=link.fileno() in ready)
                if reason is not None and not self._is_over.is_set():
                    self._end(EngineFault(f"rank {rank} of {self._worker_id} {reason}", rank=rank))

    def _hear(self, rank: int, past_s: float, *, is_ready: bool) -> str | None:
        """What is wrong with this rank, or None."""
        if self._is_over.is_set():
            return None
        if not is_ready:
            self._silence_s[rank] += past_s
            is_late = self._silence_s[rank] > self._wire.silence_timeout_s
            return f"has not been heard for {self._silence_s[rank]:.1f} s" if is_late else None
        self._silence_s[rank] = 0.0
        try:
            message = decode(self._links[rank].receive())
        except ServingError as error:
            return f"is gone: {error}"
        if isinstance(message, Failed):
            return f"failed: {message.reason}"
        return None if isinstance(message, Beat) else f"says {type(message).__name__} in the middle of steps"

    def _end(self, fault: EngineFault) -> None:
        self.fault = fault
        self._is_over.set()
        logger.error("%s", fault)
        self._on_fault(fault)


class GroupRunner:
    """A `StepRunner` of all ranks: called on the leading rank's engine thread, returns what that rank's part of the step returns.

    joins_others: an empty plan is everybody's: other workers of the replica may have rows in the step.
    """

    def __init__(
        self, worker_id: str, runner: StepRunner, links: Mapping[int, RankLink], watch: RankWatch, *, joins_others: bool = False
    ) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._links = links
        self._watch = watch
        self._joins_others = joins_others
        self._encoder = PlanEncoder()

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`. Raises EngineFault that names the rank, whichever it was; the group is of no use then."""
        if self._watch.fault is not None:
            raise self._watch.fault
        try:
            if plan.slices or plan.copies or self._joins_others:
                frame = encode(Step(self._encoder.encode(plan)))
                for link in self._links.values():
                    link.send(frame)
            return self._runner.run(plan)
        except Exception as error:
            # Whatever it is, the others are in another place of the step now or gone: no step can follow.
            raise self._name_cause(error, plan.step_number) from error

    def _name_cause(self, error: Exception, step_number: int) -> EngineFault:
        fault = self._watch.wait_for_fault(REASON_GRACE_S)
        if fault is not None:
            return EngineFault(f"{fault.message}; step {step_number} ended with it", **fault.fields)
        return EngineFault(f"rank 0 of {self._worker_id} failed: {type(error).__name__}: {error}", rank=0, step_number=step_number)


class GroupLead:
    """The leading rank's side of its group, from before the first rank has joined. Listens from the start.

    `gather` and `start` block and are for the engine thread; `close` is for any, and ends them. on_fault: called once, on a thread of
    its own, when another rank is lost after `start`. pids: of all ranks that are here, by rank.
    """

    def __init__(
        self,
        secret: bytes,
        me: Party,
        host: str,
        config: RankGroupConfig,
        wire: WireConfig,
        on_fault: Callable[[EngineFault], None],
    ) -> None:
        self.pids: dict[int, int] = {}
        self._secret = secret
        self._me = me
        self._config = config
        self._wire = wire
        self._on_fault = on_fault
        self._listener = RankListener(host)
        self._transfers_listener = RankListener(host)
        self._links: dict[int, RankLink] = {}
        self._transfer_links: dict[int, RankLink] = {}
        self._watch: RankWatch | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where the other ranks connect to."""
        return self._listener.host, self._listener.port

    @property
    def layout(self) -> ParallelLayout:
        """How the worker is cut."""
        return self._config.layout

    def gather(self) -> ParallelContext:
        """Wait for all ranks and make the groups. Raises EngineFault when some do not come, PeerLost when one goes or after `close`."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        layout = self._config.layout
        while missing := [rank for rank in range(1, layout.num_ranks) if rank not in self._links]:
            try:
                self._admit(max(0.0, deadline_s - time.monotonic()), self._listener, self._join)
            except TransferTimeout as error:
                raise EngineFault(
                    f"ranks {missing} of {self._me.party_id} have not joined within {self._config.start_timeout_s:g} s"
                ) from error
        self._listener.close()
        store = serve_store(self._listener.host, layout.num_ranks, self._config.start_timeout_s)
        for link in self._links.values():
            link.send(encode(Welcome(store.port)))
        return make_context(layout, 0, store, self._config.step_timeout_s, host=self._listener.host)

    def start(self, runner: StepRunner, terms: RankTerms) -> GroupRunner:
        """Wait until all ranks are loaded, compare them, and let them follow.

        Raises ConfigError when a rank has loaded something else, EngineFault when one has failed, PeerLost, TransferTimeout.
        """
        deadline_s = time.monotonic() + self._config.start_timeout_s
        for rank in sorted(self._links):
            self._compare(rank, terms, deadline_s)
        for link in self._links.values():
            link.send(encode(Begin(self._transfers_listener.port)))
        self._watch = RankWatch(self._me.party_id, self._links, self._wire, self._on_fault)
        joins_others = self._config.layout.dp_size > 1
        return GroupRunner(self._me.party_id, runner, self._links, self._watch, joins_others=joins_others)

    def link_transfers(self) -> tuple[RankLink, ...]:
        """After `start`: the connections to the other ranks' transfers, rank 1 first. Raises EngineFault when they do not come."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        while missing := sorted(self._links.keys() - self._transfer_links.keys()):
            try:
                self._admit(max(0.0, deadline_s - time.monotonic()), self._transfers_listener, self._take_transfers)
            except TransferTimeout as error:
                raise EngineFault(
                    f"ranks {missing} of {self._me.party_id} have not connected their transfers within {self._config.start_timeout_s:g} s"
                ) from error
        self._transfers_listener.close()
        return tuple(self._transfer_links[rank] for rank in sorted(self._transfer_links))

    def close(self, *, has_ended_well: bool) -> None:
        """Listen no more. Where the worker has ended well, tell the others and wait for their ends, shortly; otherwise leave their
        connections to the end of this process, so that whoever watches the processes hears this rank's reason first.
        """
        self._listener.close()
        self._transfers_listener.close()
        if self._watch is not None:
            self._watch.stop()
        if has_ended_well:
            for link in self._links.values():
                with contextlib.suppress(PeerLost):
                    link.send(encode(Stop()))
            for link in self._links.values():
                _wait_for_end(link)
                link.close()

    def _admit(self, timeout_s: float, listener: RankListener, take: Callable[[RankLink, Party], str | None]) -> None:
        """Take the next connection. One that is not of this worker is refused and changes nothing."""
        link = listener.accept(timeout_s, self._wire)
        try:
            party = link.prove(self._secret, self._me, Role.LISTENER, self._wire, self._wire.hello_timeout_s)
        except ServingError as error:
            logger.warning("a stranger was refused worker_id=%s reason=%s", self._me.party_id, error)
            link.close()
            return
        try:
            reason = take(link, party)
        except ServingError as error:
            reason = str(error)
        if reason is not None:
            logger.warning("a rank was refused worker_id=%s party_id=%s reason=%s", self._me.party_id, party.party_id, reason)
            with contextlib.suppress(PeerLost):
                link.send(encode(Refused(reason)))
            link.close()

    def _join(self, link: RankLink, party: Party) -> str | None:
        """Why the rank is refused, or None when it is one of ours now."""
        message = decode(link.receive(self._wire.hello_timeout_s))
        if not isinstance(message, Join):
            return f"{type(message).__name__} is not what a rank begins with"
        rank, layout = message.rank, self._config.layout
        if message.layout != layout:
            return f"rank {rank} was told the layout {message.layout}, this worker's is {layout}: give all ranks one configuration"
        if not 0 < rank < layout.num_ranks or party.party_id != rank_name(self._me.party_id, rank):
            return f"{party.party_id} says that it is rank {rank}; this is {self._me.party_id} with {layout.num_ranks} ranks"
        if rank in self._links:
            return f"rank {rank} of {self._me.party_id} is here already"
        self._links[rank] = link
        self.pids[rank] = message.pid
        return None

    def _take_transfers(self, link: RankLink, party: Party) -> str | None:
        """Why the connection is refused, or None when it is that of one of our ranks."""
        message = decode(link.receive(self._wire.hello_timeout_s))
        if not isinstance(message, Transfers):
            return f"{type(message).__name__} is not what the connection of a rank's transfers begins with"
        rank = message.rank
        if rank not in self._links or rank in self._transfer_links or party.party_id != rank_name(self._me.party_id, rank):
            return f"{party.party_id} says that it has the transfers of rank {rank}; nobody waits for them"
        self._transfer_links[rank] = link
        return None

    def _compare(self, rank: int, terms: RankTerms, deadline_s: float) -> None:
        link = self._links[rank]
        try:
            message: GroupMessage = decode(link.receive(max(0.0, deadline_s - time.monotonic())))
        except PeerLost as error:
            raise EngineFault(f"rank {rank} of {self._me.party_id} is gone: {error}", rank=rank) from error
        if isinstance(message, Failed):
            raise EngineFault(f"rank {rank} of {self._me.party_id} could not load: {message.reason}", rank=rank)
        if not isinstance(message, Loaded):
            raise EngineFault(f"rank {rank} of {self._me.party_id} says {type(message).__name__} instead of having loaded", rank=rank)
        if (reason := describe_difference(rank, message.terms, terms)) is not None:
            with contextlib.suppress(PeerLost):
                link.send(encode(Refused(reason)))
            raise ConfigError(f"{self._me.party_id}: {reason}")


def describe_difference(rank: int, found: RankTerms, expected: RankTerms) -> str | None:
    """What a rank has loaded otherwise than rank 0, in words, or None."""
    names = [item.name for item in fields(RankTerms) if getattr(found, item.name) != getattr(expected, item.name)]
    if not names:
        return None
    parts = [f"{name} {getattr(found, name)} (rank 0: {getattr(expected, name)})" for name in names]
    return f"rank {rank} has loaded something else than rank 0: {', '.join(parts)}; give all ranks the same checkpoint and configuration"


def _wait_for_end(link: RankLink) -> None:
    """Read until the other end closes: closing over unread frames could take the Stop with it."""
    deadline_s = time.monotonic() + FAREWELL_S
    with contextlib.suppress(ServingError):
        while True:
            link.receive(max(0.0, deadline_s - time.monotonic()))
