"""What both workers have in common around their engines: start, serve, watch, drain and stop, in that order.

Knows: which part is started and closed when, the worker's state, and that a fault ends its service. Does not know what a
worker does with a message or a step (`worker_role.py`).
"""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from glm_runtime.cache_layout import landed_formats
from glm_runtime.engine.loaded_model import LoadedModel, load_model
from glm_runtime.engine.loop import EngineLoop, EngineThread
from glm_runtime.engine.rank_group import GroupLead, RankGroupConfig
from glm_runtime.engine.rest_audit import RestAudit
from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
from glm_runtime.engine.worker_role import Outside, WorkerRole
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.endpoint import EndpointCallbacks, WorkerEndpoint
from kv_transfer.errors import EngineFault
from kv_transfer.identity import PeerId, WorkerId, new_incarnation
from kv_transfer.link import Party
from kv_transfer.messages import (
    DrainWorker,
    Message,
    PartyKind,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
    WorkerTable,
)

logger = logging.getLogger(__name__)

DEFAULT_START_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellTiming:
    """See the fields of the same names in the workers' configs. start_timeout_s: of the worker's other ranks, where there are some."""

    tick_interval_s: float
    step_timeout_s: float
    stop_timeout_s: float
    start_timeout_s: float


MakeRole = Callable[[LoadedModel, Outside, Party], WorkerRole]
OnServing = Callable[[WorkerAddress], None]


class WorkerShell:
    """One start of one worker. `run` blocks in one thread; the two requests come from any other."""

    def __init__(
        self,
        identity: WorkerIdentity,
        role_name: Literal["prefill", "decode"],
        runtime_config: RuntimeConfig,
        network: WorkerNetwork,
        timing: ShellTiming,
        make_role: MakeRole,
    ) -> None:
        self.me = Party(PartyKind(role_name), identity.worker_id, new_incarnation())
        self._identity = identity
        self._role_name: Literal["prefill", "decode"] = role_name
        self._runtime_config = runtime_config
        self._network = network
        self._timing = timing
        self._make_role = make_role
        self._state = WorkerState.PENDING
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._is_stop_requested = False
        self._fault: BaseException | None = None
        self._model: LoadedModel | None = None
        self._role: WorkerRole | None = None
        self._table: WorkerTable | None = None
        self._drain_until_s: float | None = None
        self._rest_audit: RestAudit | None = None
        self._lead = self._make_lead()

    @property
    def group_address(self) -> tuple[str, int] | None:
        """Where the worker's other ranks connect to; None where there are none."""
        return self._lead.address if self._lead is not None else None

    # -- from other threads --------------------------------------------------------------------------------------------

    def run(self, on_serving: OnServing | None) -> None:
        """Serve until a stop is requested. Raises what ended the worker otherwise."""
        asyncio.run(self._main(on_serving))

    def request_stop(self) -> None:
        """End `run`; also before it has begun."""
        with self._lock:
            self._is_stop_requested = True
        self._post(self._stop.set)

    def request_drain(self, deadline_s: float) -> None:
        """Take no new request, end those here within `deadline_s`, then be QUIET."""
        self._post(lambda: self._start_draining(deadline_s))

    def _post(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(function)

    # -- the life of the worker ----------------------------------------------------------------------------------------

    async def _main(self, on_serving: OnServing | None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._receive_stray)
        with self._lock:
            self._loop = loop
            if self._is_stop_requested:
                return
        self._endpoint = self._make_endpoint()
        thread = EngineThread(f"{self._role_name}-engine")
        self._state = WorkerState.STARTING
        try:
            await self._endpoint.start()
            if await self._load(thread):
                await self._serve(thread, on_serving)
        finally:
            await self._close(thread)

    async def _load(self, thread: EngineThread) -> bool:
        """Load the model on the engine thread; False when a stop came first. Raises what `fault` was told meanwhile: a lost rank."""
        incarnation, drafts_here, lead = self.me.incarnation, self._role_name == "decode", self._lead
        loading = thread.submit(lambda config: load_model(config, incarnation, drafts_here=drafts_here, lead=lead), self._runtime_config)
        stopping = asyncio.ensure_future(self._stop.wait())
        both: set[asyncio.Future[Any]] = {loading, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            if self._fault is not None:
                raise self._fault
            return False
        self._model = loading.result()
        return True

    async def _serve(self, thread: EngineThread, on_serving: OnServing | None) -> None:
        assert self._model is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                self._role = self._make_role(self._model, self, self.me)
                self._rest_audit = RestAudit(self._model.pool)
                self._engine_loop = EngineLoop(self._role, thread)
                self._set_state(WorkerState.WARM)
                engine = tasks.create_task(self._engine_loop.run())
                ticking = tasks.create_task(self._tick_forever())
                if self._table is not None:
                    self._role.table_changed(self._table)
                self._set_state(WorkerState.SERVING)
                if on_serving is not None:
                    on_serving(self._endpoint.address)
                await self._stop.wait()
                if self._fault is not None:
                    raise self._fault
                await self._stop_serving(engine)
                ticking.cancel()
        except BaseExceptionGroup as group:
            # One cause is enough: the others are what it dragged down.
            raise group.exceptions[0] from None

    async def _stop_serving(self, engine: "asyncio.Task[None]") -> None:
        assert self._role is not None
        self._set_state(WorkerState.DRAINING)
        self._role.start_draining()
        self._role.give_up_all("the worker stops", time.monotonic())
        self._engine_loop.stop()
        done, _ = await asyncio.wait({engine}, timeout=self._timing.stop_timeout_s)
        if not done:
            logger.warning("gave up waiting for a step worker_id=%s timeout_s=%s", self.me.party_id, self._timing.stop_timeout_s)
            engine.cancel()

    async def _close(self, thread: EngineThread) -> None:
        """Bytes first, then words, then the ranks and the thread. Each part gets its time, and what does not end in it is named.

        After a fault nobody waits for the thread: a step may hang in it for want of a rank that is gone.
        """
        if self._role is not None:
            await self._close_part("transport", self._role.close())
        await self._close_part("endpoint", self._endpoint.close())
        if self._lead is not None:
            await asyncio.to_thread(self._lead.close, has_ended_well=self._is_stop_requested and self._fault is None)
        timeout_s = self._timing.stop_timeout_s if self._fault is None else 0.0
        if not await asyncio.to_thread(thread.stop, timeout_s):
            logger.warning("gave up closing worker_id=%s part=engine thread", self.me.party_id)

    async def _close_part(self, part: str, closing: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timing.stop_timeout_s):
                await closing
        except TimeoutError:
            logger.warning("gave up closing worker_id=%s part=%s", self.me.party_id, part)

    async def _tick_forever(self) -> None:
        assert self._role is not None
        assert self._rest_audit is not None
        while True:
            await asyncio.sleep(self._timing.tick_interval_s)
            now_s = time.monotonic()
            step_age_s = self._engine_loop.step_age_s(now_s)
            if step_age_s > self._timing.step_timeout_s:
                raise EngineFault(f"a step has been running for {step_age_s:.0f} s: the engine hangs and the worker must be replaced")
            self._role.tick(now_s)
            self._rest_audit.look(self._role.num_live, now_s)
            self._watch_drain(now_s)

    # -- draining ------------------------------------------------------------------------------------------------------

    def _start_draining(self, deadline_s: float) -> None:
        if self._role is None:
            self._stop.set()  # nothing has been accepted yet
            return
        drain_s = min(deadline_s, self._network.timers.drain_cap_s)
        self._drain_until_s = time.monotonic() + drain_s
        self._role.start_draining()
        if self._state is not WorkerState.QUIET:
            self._set_state(WorkerState.DRAINING)

    def _watch_drain(self, now_s: float) -> None:
        if self._drain_until_s is None or self._state is not WorkerState.DRAINING:
            return
        assert self._role is not None
        assert self._model is not None
        is_late = now_s >= self._drain_until_s
        if self._role.num_live == 0 and (is_late or self._model.pool.num_held == 0):
            audit = self._model.pool.audit()
            level = logging.INFO if audit.is_quiesced else logging.WARNING
            logger.log(level, "drained worker_id=%s held=%d holders=%s", self.me.party_id, audit.num_held, audit.holders)
            self._set_state(WorkerState.QUIET)
        elif is_late:
            logger.warning("draining took too long worker_id=%s given_up=%d", self.me.party_id, self._role.num_live)
            self._role.give_up_all("the worker is drained and its time is over", now_s)

    def _set_state(self, state: WorkerState) -> None:
        logger.info("worker state worker_id=%s from=%s to=%s", self.me.party_id, self._state.value, state.value)
        self._state = state
        self._endpoint.report()

    # -- Outside: what the role asks for -------------------------------------------------------------------------------

    def send(self, peer: PeerId, message: Message) -> None:
        """Post a message; without a connection it is lost."""
        self._endpoint.send(peer, message)

    def keep(self, address: WorkerAddress) -> None:
        """Stay connected to another worker."""
        self._endpoint.keep(address)

    def forget(self, worker_id: WorkerId) -> None:
        """Stop dialling another worker."""
        self._endpoint.forget(worker_id)

    def wake(self) -> None:
        """Let the engine loop decide again."""
        self._engine_loop.wake()

    def report(self) -> None:
        """Tell the directory now."""
        self._endpoint.report()

    def drain(self) -> None:
        """Take no new request, end those here, be QUIET: who watches the workers then starts this one again."""
        self._start_draining(self._network.timers.drain_cap_s)

    def fault(self, error: BaseException) -> None:
        """End the service with this error."""
        if self._fault is None:
            self._fault = error
            self._stop.set()

    # -- the other ranks -----------------------------------------------------------------------------------------------

    def _make_lead(self) -> GroupLead | None:
        layout = self._runtime_config.parallel
        if layout.num_ranks == 1:
            return None
        group = RankGroupConfig(layout=layout, step_timeout_s=self._timing.step_timeout_s, start_timeout_s=self._timing.start_timeout_s)
        identity = self._identity
        return GroupLead(identity.secret, self.me, identity.host, group, self._network.wire, self._rank_lost)

    def _rank_lost(self, error: EngineFault) -> None:
        """Called on a thread of the group's."""
        self._post(lambda: self.fault(error))

    # -- what the endpoint calls ---------------------------------------------------------------------------------------

    def _make_endpoint(self) -> WorkerEndpoint:
        identity = self._identity
        return WorkerEndpoint(
            identity.secret,
            self.me,
            host=identity.host,
            directory_host=identity.directory_host,
            directory_port=identity.directory_port,
            callbacks=EndpointCallbacks(
                on_message=self._receive,
                on_peer_up=lambda party: self._guard(lambda role: role.peer_up(party)),
                on_peer_lost=lambda party: self._guard(lambda role: role.peer_lost(party, time.monotonic())),
                on_table=self._keep_table,
                make_entry=self._make_entry,
            ),
            config=self._network.wire,
            rng=random.Random(self.me.incarnation),
        )

    def _receive(self, party: Party, message: Message) -> None:
        if not isinstance(message, DrainWorker):
            self._guard(lambda role: role.receive(party, message, time.monotonic()))
        elif party.kind is PartyKind.SUPERVISOR:
            self._start_draining(message.deadline_s)

    def _keep_table(self, table: WorkerTable) -> None:
        self._table = table
        self._guard(lambda role: role.table_changed(table))

    def _guard(self, function: Callable[[WorkerRole], None]) -> None:
        """Call into the role, if there is one yet. An error there is a bug: the loop would only log it and serve on, wrong."""
        if self._role is None:
            return
        try:
            function(self._role)
        except Exception as error:
            logger.exception("a callback failed worker_id=%s", self.me.party_id)
            self.fault(error)

    def _receive_stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback that nobody waits for. The network's are its own business; any other is a bug, as in `_guard`."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.fault(error)

    def _make_entry(self) -> WorkerEntry:
        address = WorkerAddress(WorkerId(self.me.party_id), self.me.incarnation, self._identity.host, 0)
        model, role = self._model, self._role
        return WorkerEntry(
            address=address,
            role=self._role_name,
            state=self._state,
            fingerprint=model.layout.fingerprint if model is not None else "",
            pid=os.getpid(),
            load=role.load() if role is not None else WorkerLoad(),
            pairs=role.pair_states() if role is not None else (),
            max_model_len_tokens=model.request_limits.max_sequence_tokens if model is not None else 0,
            cache_formats=landed_formats(model.layout) if model is not None else (),
            is_pool_audited=self._rest_audit is not None and self._rest_audit.is_audited,
            parallel=self._runtime_config.parallel.describe(),
            rank_pids=self._rank_pids(),
        )

    def _rank_pids(self) -> tuple[int, ...]:
        """Of all ranks that are here, in order of ranks."""
        others = self._lead.pids if self._lead is not None else {}
        return (os.getpid(), *(others[rank] for rank in sorted(others)))
