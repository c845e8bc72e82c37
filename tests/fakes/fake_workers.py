"""Workers without a model: real sockets, the real protocol towards the router, a toy model, and faults on demand.

Between a fake prefill and a fake decode worker nothing travels but the first token: what is under test is the router's side. They run on
one asyncio loop in a thread of their own; everything on `FakeCluster` may be called from the test's thread.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryServer
from kv_transfer.errors import PeerLost
from kv_transfer.identity import Incarnation, TransferId, WorkerId, count_tokens, new_incarnation, pack_tokens, unpack_tokens
from kv_transfer.link import Link, LinkServer, Party
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
    PartyKind,
    Ping,
    Progress,
    SinkBusy,
    SinkReady,
    StartSource,
    TokenDelta,
    TokenLogprobs,
    Tokens,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
)

T = TypeVar("T")
Model = Callable[[Sequence[int], Sequence[int]], int]
"""(prompt, output so far) -> next token."""

SECRET = b"the secret of the fake cluster"
WIRE = WireConfig(ping_interval_s=0.1, silence_timeout_s=2.0, redial_min_s=0.01, redial_max_s=0.1, table_interval_s=0.01)
HOST = "127.0.0.1"


def hash_model(num_token_ids: int) -> Model:
    """A model whose next token depends on every token before it: one that is missing or repeated changes all that follow."""

    def next_token(prompt: Sequence[int], output: Sequence[int]) -> int:
        digest = hashlib.sha256(pack_tokens([*prompt, *output])).digest()
        return int.from_bytes(digest[:4], "little") % num_token_ids

    return next_token


def scripted_model(script: Sequence[int]) -> Model:
    """A model that says the same whatever it is asked; after the script it begins again."""
    return lambda _prompt, output: script[len(output) % len(script)]


@dataclass
class Faults:
    """What goes wrong on one worker. An index is an output index; each fault happens once, unless it says otherwise."""

    crash_at_index: int | None = None
    mute_at_index: int | None = None
    lose_frame_at_index: int | None = None
    is_mute: bool = False
    num_busy: int = 0
    fail_next: tuple[FailureKind, str, str] | None = None
    fail_at_index: tuple[int, FailureKind, str] | None = None
    repeats_frames: bool = False
    ignores_cancel: int = 0


@dataclass
class Sequence_:  # noqa: N801 - Sequence is taken
    """One request on a fake decode worker."""

    opened: OpenSink
    link: Link
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    task: "asyncio.Task[None] | None" = None


def _with_logprobs(delta: TokenDelta, opened: OpenSink) -> TokenDelta:
    """Numbers that tell places apart: -1/8 for the first place, -2/8 for the second ..., and the next ids beside the token."""
    sampling = opened.sampling

    def told(token: int, place: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(-(place + 1) / 8, 1, tuple((token + other, -(place + 1) / 8 - other) for other in range(count)))

    if sampling.logprobs >= 0:
        own = [told(token, delta.first_index + number, sampling.logprobs) for number, token in enumerate(delta.tokens)]
        delta = msgspec.structs.replace(delta, logprobs=tuple(own))
    if sampling.prompt_logprobs >= 0 and delta.first_index == 0:
        prompt = unpack_tokens(opened.tokens)[1 : opened.num_prompt_tokens]
        scored = [told(token, place, sampling.prompt_logprobs) for place, token in enumerate(prompt, start=1)]
        delta = msgspec.structs.replace(delta, prompt_logprobs=tuple(scored))
    return delta


class FakeWorker:
    """One worker, over all its starts. Lives on the cluster's loop."""

    def __init__(self, cluster: "FakeCluster", worker_id: str, role: Literal["prefill", "decode"]) -> None:
        self.cluster = cluster
        self.worker_id = WorkerId(worker_id)
        self.role: Literal["prefill", "decode"] = role
        self.incarnation = Incarnation(0)
        self.state = WorkerState.PENDING
        self.faults = Faults()
        self.received: list[Message] = []
        self.sequences: dict[TransferId, Sequence_] = {}
        self.closed: set[TransferId] = set()
        self._server: LinkServer | None = None
        self._links: list[Link] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.incarnation = new_incarnation()
        me = Party(PartyKind(self.role), self.worker_id, self.incarnation)
        self._server = LinkServer(SECRET, me, self._accept, HOST, config=WIRE, make_ping=self._ping)
        await self._server.start()
        self.state = WorkerState.SERVING
        self.cluster.directory.put(self.entry())

    async def crash(self) -> None:
        """Every connection ends at once; nothing is said any more."""
        self.state = WorkerState.GONE
        for task in list(self._tasks):
            task.cancel()
        for link in self._links:
            link.close()
        self._links.clear()
        self.sequences.clear()
        if self._server is not None:
            await self._server.close()
        self.cluster.directory.set_gone(self.worker_id, self.incarnation)

    def entry(self) -> WorkerEntry:
        assert self._server is not None
        return WorkerEntry(
            address=WorkerAddress(self.worker_id, self.incarnation, HOST, self._server.port),
            role=self.role,
            state=self.state,
            fingerprint="fake",
            pid=1,
            load=self._load(),
            pairs=self._pairs(),
            max_model_len_tokens=self.cluster.max_model_len_tokens,
            cache_formats=(("mla_kv", "fp8_ds_mla"),),
        )

    def _load(self) -> WorkerLoad:
        return WorkerLoad(num_running=len(self.sequences), blocks_total=1024, blocks_free=1024)

    def _pairs(self) -> tuple[PairState, ...]:
        if self.role == "prefill":
            return ()
        peers = [worker for worker in self.cluster.workers.values() if worker.role == "prefill" and worker.state is WorkerState.SERVING]
        return tuple(PairState(worker.worker_id, worker.incarnation, True) for worker in peers)

    def _ping(self) -> Ping:
        return Ping(self._load(), self._pairs(), self.state)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _accept(self, link: Link) -> None:
        self._links.append(link)
        link.on_message = lambda message: self._receive(link, message)
        link.on_closed = lambda _reason: self._lose(link)

    def _lose(self, link: Link) -> None:
        for transfer, sequence in list(self.sequences.items()):
            if sequence.link is link:
                self._drop(transfer)

    def _receive(self, link: Link, message: Message) -> None:
        if isinstance(message, Ping):
            return
        self.received.append(message)
        if self.faults.is_mute:
            return
        match message:
            case OpenSink():
                self._open(link, message)
            case StartSource():
                self._start(link, message)
            case Cancel() if self.faults.ignores_cancel > 0:
                self.faults.ignores_cancel -= 1
            case Cancel():
                is_known = message.transfer in self.sequences or message.transfer in self.closed
                self._drop(message.transfer)
                self.closed.add(message.transfer)
                link.post(Closed(message.transfer, message.reason) if is_known else Gone(message.transfer, "cancel"))
            case Ask():
                sequence = self.sequences.get(message.transfer)
                if sequence is None:
                    link.post(Gone(message.transfer, "ask"))
                else:
                    self._emit(message.transfer, sequence, message.next_index)
            case _:
                raise AssertionError(f"{self.worker_id} got {message}")

    def _drop(self, transfer: TransferId) -> None:
        sequence = self.sequences.pop(transfer, None)
        if sequence is not None and sequence.task is not None:
            sequence.task.cancel()

    def _open(self, link: Link, message: OpenSink) -> None:
        if message.transfer in self.closed:
            link.post(Gone(message.transfer, "opensink"))
        elif self.faults.fail_next is not None:
            failure, self.faults.fail_next = self.faults.fail_next, None
            link.post(Failed(message.transfer, *failure))
        elif self.faults.num_busy > 0:
            self.faults.num_busy -= 1
            link.post(SinkBusy(message.transfer, 0.05))
        else:
            assert count_tokens(message.tokens) == message.num_prompt_tokens + message.first_index
            self.sequences.setdefault(message.transfer, Sequence_(message, link))
            link.post(SinkReady(message.transfer, 0, 64))
            if message.source is None:
                self.take_record(message.transfer)

    def _start(self, link: Link, message: StartSource) -> None:
        if message.transfer in self.closed:
            link.post(Gone(message.transfer, "startsource"))
        elif self.faults.fail_next is not None:
            failure, self.faults.fail_next = self.faults.fail_next, None
            link.post(Failed(message.transfer, *failure))
        else:
            link.post(Progress(message.transfer, "queued", 0, 0, 0))
            self.sequences[message.transfer] = Sequence_(None, link)  # type: ignore[arg-type]
            self._spawn(self._prefill(link, message))

    async def _prefill(self, link: Link, message: StartSource) -> None:
        waited_s = 0.0
        while waited_s < self.cluster.prefill_s:
            await asyncio.sleep(0.05)
            waited_s += 0.05
            if message.transfer not in self.sequences:
                return
            link.post(Progress(message.transfer, "computing", 64, 0, 0))
        if message.transfer not in self.sequences or self.faults.is_mute:
            return
        link.post(Progress(message.transfer, "complete", count_tokens(message.tokens), 0, 1))
        for worker in self.cluster.workers.values():
            if worker.incarnation == message.sink.incarnation:
                worker.take_record(message.transfer)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def take_record(self, transfer: TransferId) -> None:
        """Everything that was missing has come: decode from here on."""
        sequence = self.sequences.get(transfer)
        if sequence is not None and sequence.task is None:
            sequence.task = self._spawn(self._decode(transfer, sequence))

    async def _decode(self, transfer: TransferId, sequence: Sequence_) -> None:
        opened = sequence.opened
        tokens = unpack_tokens(opened.tokens)
        prompt, emitted = tokens[: opened.num_prompt_tokens], tokens[opened.num_prompt_tokens :]
        while sequence.finish is None:
            index = opened.first_index + len(sequence.output)
            if self._strike(transfer, sequence, index):
                return
            token = self.cluster.model(prompt, [*emitted, *sequence.output])
            sequence.output.append(token)
            if token in opened.sampling.stop_token_ids:
                sequence.finish = FinishReason.STOP
            elif index + 1 >= opened.sampling.max_tokens:
                sequence.finish = FinishReason.LENGTH
            if self.faults.lose_frame_at_index == index:
                self.faults.lose_frame_at_index = None
            else:
                self._emit(transfer, sequence, index)
                if self.faults.repeats_frames:
                    self._emit(transfer, sequence, max(index - 2, opened.first_index))
            await asyncio.sleep(self.cluster.step_s)

    def _strike(self, transfer: TransferId, sequence: Sequence_, index: int) -> bool:
        if self.faults.crash_at_index == index:
            self.faults.crash_at_index = None
            self._spawn(self.crash())
            return True
        if self.faults.fail_at_index is not None and self.faults.fail_at_index[0] == index:
            (_, kind, code), self.faults.fail_at_index = self.faults.fail_at_index, None
            sequence.link.post(Failed(transfer, kind, code, "internal words"))
            return True
        if self.faults.mute_at_index == index:
            self.faults.mute_at_index = None
            self.faults.is_mute = True
        return self.faults.is_mute

    def _emit(self, transfer: TransferId, sequence: Sequence_, first_index: int) -> None:
        skip = max(first_index - sequence.opened.first_index, 0)
        tokens = tuple(sequence.output[skip:])
        try:
            delta = TokenDelta(transfer, first_index, tokens, sequence.finish, self.cluster.num_cached_tokens)
            sequence.link.post(Tokens((_with_logprobs(delta, sequence.opened),)))
        except PeerLost:
            return

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class FakeCluster:
    """A directory and some workers on a loop of their own. Call `start` and `stop`; the rest in between."""

    def __init__(self, model: Model, *, num_prefill: int = 1, num_decode: int = 1, max_model_len_tokens: int = 8192) -> None:
        self.model = model
        self.step_s = 0.0
        self.prefill_s = 0.0
        self.num_cached_tokens = 0
        self.max_model_len_tokens = max_model_len_tokens
        self.workers: dict[str, FakeWorker] = {}
        self._names: list[tuple[str, Literal["prefill", "decode"]]] = [
            *((f"prefill-{number}", "prefill") for number in range(num_prefill)),
            *((f"decode-{number}", "decode") for number in range(num_decode)),
        ]  # type: ignore[list-item]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-cluster", daemon=True)
        self.directory_port = 0

    def start(self, *, with_workers: bool = True) -> None:
        """Open the directory, then start every worker."""
        self._thread.start()
        self._run(self._open())
        if with_workers:
            self.start_workers()

    def start_workers(self) -> None:
        """Start those that are not running."""
        for worker in self.workers.values():
            if worker.state is not WorkerState.SERVING:
                self._run(worker.start())

    def stop(self) -> None:
        """Close everything."""
        for worker in self.workers.values():
            if worker.state is WorkerState.SERVING:
                self._run(worker.crash())
        self._run(self._directory_server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def crash(self, worker_id: str) -> None:
        """Kill a worker."""
        self._run(self.workers[worker_id].crash())

    def restart(self, worker_id: str) -> None:
        """Start a worker again, as another incarnation."""
        self._run(self.workers[worker_id].start())

    def received(self, worker_id: str, kind: type[T]) -> list[T]:
        """What a worker has been told, of one kind, in order."""
        return [message for message in list(self.workers[worker_id].received) if isinstance(message, kind)]

    def num_live(self) -> int:
        """Requests that any worker still holds."""
        return sum(len(worker.sequences) for worker in self.workers.values())

    def reset(self) -> None:
        """Forget faults, delays and what was received; start what is down."""
        self.step_s = self.prefill_s = 0.0
        self.num_cached_tokens = 0
        for worker in self.workers.values():
            worker.faults = Faults()
            worker.received.clear()
        self.start_workers()

    async def _open(self) -> None:
        self.directory = DirectoryServer(config=WIRE)
        me = Party(PartyKind.SUPERVISOR, "directory", new_incarnation())
        self._directory_server = LinkServer(SECRET, me, self.directory.accept, HOST, config=WIRE)
        await self._directory_server.start()
        self.directory_port = self._directory_server.port
        self.workers = {name: FakeWorker(self, name, role) for name, role in self._names}

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)
