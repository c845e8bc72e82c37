"""A relay and fake workers in virtual time: a seeded adversary decides when frames arrive, which are lost, and who dies.

Frames of one link arrive in order; a link that breaks loses what is under way. The toy model's next token depends on every token before
it, so a token that is missing or repeated anywhere changes the whole rest of the answer.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kv_transfer.identity import Incarnation, RequestId, TransferId, WorkerId, count_tokens, pack_tokens, unpack_tokens
from kv_transfer.messages import (
    Ask,
    Cancel,
    Closed,
    Failed,
    FailureKind,
    FinishReason,
    Gone,
    Message,
    OpenSink,
    PairState,
    Ping,
    Progress,
    SamplingParameters,
    SinkBusy,
    SinkReady,
    StartSource,
    TokenDelta,
    Tokens,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
    WorkerTable,
)
from router.config import RouterConfig
from router.generation_request import GenerationRequest
from router.output import Output, Wakeup
from router.policy import WorkerRef
from router.relay import Relay, RelayHooks, RequestRecord

TICK_S = 0.1
PING_S = 1.0
STOP_TOKEN = 0
NEVER_STARTED = Incarnation(0)


REPEATS = 0.1
"""Share of frames that say again what an earlier one said."""


def next_token(tokens: list[int]) -> int:
    """Toy model: 0 (the stop token) once in a while."""
    return hashlib.sha256(pack_tokens(tokens)).digest()[0] % 23


def coloured_token(tokens: list[int], attempt: int) -> int:
    """A toy model that is not reproducible: each attempt would go on differently, and its token says which one drew it."""
    return int.from_bytes(hashlib.sha256(pack_tokens(tokens)).digest()[:3], "little") * 64 + attempt % 64


def calm_answer(prompt: list[int], max_tokens: int) -> list[int]:
    """What one process would have said."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens[len(prompt) :]


@dataclass
class Held:
    """One transfer on a worker."""

    opened: OpenSink | StartSource
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    is_running: bool = False
    is_complete: bool = False


@dataclass
class VirtualWorker:
    """One worker over all its starts."""

    worker_id: WorkerId
    role: Literal["prefill", "decode"]
    capacity: int
    incarnation: Incarnation = NEVER_STARTED
    is_alive: bool = False
    is_linked: bool = False
    link_number: int = 0
    muted_until_s: float = -1.0
    stalled_until_s: float = -1.0
    held: dict[TransferId, Held] = field(default_factory=dict)
    closed: set[TransferId] = field(default_factory=set)

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.incarnation)


class VirtualCluster:
    """Runs everything on one heap of events."""

    def __init__(
        self,
        rng: random.Random,
        config: RouterConfig,
        *,
        num_prefill: int,
        num_decode: int,
        capacity: int,
        loss: float,
        is_coloured: bool = False,
    ) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.loss = loss
        self.is_coloured = is_coloured
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._incarnations = itertools.count(1)
        self._line_free_s: dict[tuple[WorkerRef, int, str], float] = {}
        self.records: list[RequestRecord] = []
        self.outputs: dict[RequestId, Output] = {}
        self.texts: dict[RequestId, list[int]] = {}
        hooks = RelayHooks(on_placed=lambda _placement: None, on_tokens=lambda _gap, _count: None, on_ended=self.records.append)
        self.relay = Relay(config, post=self._post, hooks=hooks, clock=lambda: self.now_s)
        names: list[tuple[str, Literal["prefill", "decode"]]] = [(f"p{number}", "prefill") for number in range(num_prefill)]
        names += [(f"d{number}", "decode") for number in range(num_decode)]
        self.workers = {WorkerId(name): VirtualWorker(WorkerId(name), role, capacity) for name, role in names}
        self.after(TICK_S, self._tick)
        for worker in self.workers.values():
            self.restart(worker)
            self.after(rng.random() * PING_S, lambda worker=worker: self._ping(worker))

    # -- time ----------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), action))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Run events until the condition holds. AssertionError after `limit_s` of virtual time."""
        while not until():
            self.now_s, _, action = heapq.heappop(self._events)
            assert self.now_s < limit_s, "the condition did not come true in time"
            action()
            for request_id, output in self.outputs.items():
                self.texts[request_id] += output.take()

    def _tick(self) -> None:
        self.relay.tick()
        self.after(TICK_S, self._tick)

    def _ping(self, worker: VirtualWorker) -> None:
        if worker.is_alive and worker.is_linked:
            self._say(worker, Ping(self._load(worker), self._pairs(worker), WorkerState.SERVING))
        self.after(PING_S, lambda: self._ping(worker))

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        request = GenerationRequest(
            request_id=RequestId(name),
            prompt=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParameters(max_tokens=max_tokens, seed=1, stop_token_ids=(STOP_TOKEN,)),
        )
        self.texts[request.request_id] = []
        self.outputs[request.request_id] = self.relay.submit(request, Wakeup())

    # -- faults --------------------------------------------------------------------------------------------------------

    def crash(self, worker: VirtualWorker, down_s: float) -> None:
        """Dies now, is back after `down_s` under another incarnation."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        worker.held.clear()
        worker.closed.clear()
        self.break_link(worker, None)
        self.after(self.rng.random() * 0.3, self._push_table)
        self.after(down_s, lambda: self.restart(worker))

    def restart(self, worker: VirtualWorker) -> None:
        worker.incarnation = Incarnation(next(self._incarnations))
        worker.is_alive = True
        self._push_table()
        self.after(0.05, lambda: self._connect(worker, worker.incarnation))

    def break_link(self, worker: VirtualWorker, back_s: float | None) -> None:
        """The connection ends; what is under way is lost. Down for a second or more, the worker drops what we opened there."""
        if not worker.is_linked:
            return
        worker.is_linked = False
        worker.link_number += 1
        self.relay.on_link_down(worker.ref)
        if back_s is not None:
            if back_s >= 1.0:
                self.after(1.0, worker.held.clear)
            self.after(back_s, lambda incarnation=worker.incarnation: self._connect(worker, incarnation))

    def _connect(self, worker: VirtualWorker, incarnation: Incarnation) -> None:
        if worker.is_alive and worker.incarnation == incarnation and not worker.is_linked:
            worker.is_linked = True
            self.relay.on_link_up(worker.ref)

    def _push_table(self) -> None:
        entries = tuple(self._entry(worker) for worker in self.workers.values() if worker.is_alive)
        self.relay.on_table(WorkerTable(next(self._order), entries))

    def _entry(self, worker: VirtualWorker) -> WorkerEntry:
        address = WorkerAddress(worker.worker_id, worker.incarnation, "host", 1)
        return WorkerEntry(address, worker.role, WorkerState.SERVING, "f", 1, self._load(worker), self._pairs(worker), 8192)

    def _load(self, worker: VirtualWorker) -> WorkerLoad:
        return WorkerLoad(num_running=len(worker.held), blocks_total=100, blocks_free=100)

    def _pairs(self, worker: VirtualWorker) -> tuple[PairState, ...]:
        if worker.role == "prefill":
            return ()
        peers = [peer for peer in self.workers.values() if peer.role == "prefill" and peer.is_alive]
        return tuple(PairState(peer.worker_id, peer.incarnation, True) for peer in peers)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _post(self, ref: WorkerRef, message: Message) -> bool:
        worker = self.workers[ref.worker_id]
        if not worker.is_linked or worker.ref != ref:
            return False
        self._send(worker, "down", lambda: self._receive(worker, message))
        return True

    def _say(self, worker: VirtualWorker, message: Message) -> None:
        ref = worker.ref
        if worker.is_alive and worker.is_linked and self.now_s >= worker.muted_until_s:
            self._send(worker, "up", lambda: self.relay.on_message(ref, message))

    def _send(self, worker: VirtualWorker, direction: str, deliver: Callable[[], None]) -> None:
        ref, number = worker.ref, worker.link_number
        line = (ref, number, direction)
        held_up_s = worker.stalled_until_s if direction == "up" else 0.0
        at_s = max(self.now_s + self.rng.expovariate(200.0), self._line_free_s.get(line, 0.0), held_up_s)
        self._line_free_s[line] = at_s
        if self.rng.random() < self.loss:
            return

        def arrive() -> None:
            if worker.is_alive and worker.is_linked and worker.ref == ref and worker.link_number == number:
                deliver()

        self.after(at_s - self.now_s, arrive)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _receive(self, worker: VirtualWorker, message: Message) -> None:
        if self.now_s < worker.muted_until_s:
            return
        match message:
            case Cancel():
                was_known = worker.held.pop(message.transfer, None) is not None
                worker.closed.add(message.transfer)
                self._say(worker, Closed(message.transfer, "x") if was_known else Gone(message.transfer, "cancel"))
            case OpenSink() | StartSource() if message.transfer in worker.closed:
                self._say(worker, Gone(message.transfer, "open"))
            case OpenSink():
                self._open(worker, message)
            case StartSource():
                self._start(worker, message)
            case Ask():
                held = worker.held.get(message.transfer)
                if held is None:
                    self._say(worker, Gone(message.transfer, "ask"))
                else:
                    self._emit(worker, message.transfer, held, message.next_index)

    def _open(self, worker: VirtualWorker, message: OpenSink) -> None:
        if message.transfer not in worker.held and len(worker.held) >= worker.capacity:
            self._say(worker, SinkBusy(message.transfer, 0.2))
            return
        assert count_tokens(message.tokens) == message.num_prompt_tokens + message.first_index
        worker.held.setdefault(message.transfer, Held(message))
        self._say(worker, SinkReady(message.transfer, 0, 4))

    def _start(self, worker: VirtualWorker, message: StartSource) -> None:
        if message.transfer in worker.held:
            self._say(worker, Progress(message.transfer, "computing", 0, 0, 0))
            return
        if self.rng.random() < 0.02:
            self._say(worker, Failed(message.transfer, FailureKind.RETRYABLE_LATER, "later", ""))
            return
        worker.held[message.transfer] = Held(message)
        self._prefill(worker, worker.incarnation, message, self.rng.randrange(3))

    def _prefill(self, worker: VirtualWorker, incarnation: Incarnation, message: StartSource, beats: int) -> None:
        held = worker.held.get(message.transfer)
        if held is None or worker.incarnation != incarnation:
            return
        held.is_complete = beats <= 0
        self._say(worker, Progress(message.transfer, "complete" if held.is_complete else "computing", 0, 0, 0))
        if held.is_complete:
            sink = self.workers[message.sink.worker_id]
            if sink.is_alive and sink.incarnation == message.sink.incarnation:
                self._run(sink, sink.incarnation, message.transfer)
        if beats > -5:
            self.after(0.5, lambda: self._prefill(worker, incarnation, message, beats - 1))

    def _run(self, worker: VirtualWorker, incarnation: Incarnation, transfer: TransferId) -> None:
        held = worker.held.get(transfer)
        if held is not None and worker.incarnation == incarnation and not held.is_running:
            held.is_running = True
            self._step(worker, incarnation, transfer)

    def _step(self, worker: VirtualWorker, incarnation: Incarnation, transfer: TransferId) -> None:
        held = worker.held.get(transfer)
        if held is None or worker.incarnation != incarnation or held.finish is not None:
            return
        opened = held.opened
        index = opened.first_index + len(held.output)
        for _ in range(self.rng.randrange(1, 4)):
            if held.finish is None:
                tokens = [*unpack_tokens(opened.tokens), *held.output]
                held.output.append(coloured_token(tokens, transfer.attempt) if self.is_coloured else next_token(tokens))
                if held.output[-1] == STOP_TOKEN:
                    held.finish = FinishReason.STOP
                elif opened.first_index + len(held.output) >= opened.sampling.max_tokens:
                    held.finish = FinishReason.LENGTH
        self._emit(worker, transfer, held, index)
        if self.rng.random() < REPEATS:
            self._emit(worker, transfer, held, max(index - 2, opened.first_index))
        self.after(self.rng.expovariate(20.0), lambda: self._step(worker, incarnation, transfer))

    def _emit(self, worker: VirtualWorker, transfer: TransferId, held: Held, first_index: int) -> None:
        start = max(first_index, held.opened.first_index)
        tokens = tuple(held.output[start - held.opened.first_index :])
        self._say(worker, Tokens((TokenDelta(transfer, start, tokens, held.finish),)))
