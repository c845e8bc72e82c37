"""The smallest router that speaks the real protocol over real connections: one attempt per request, no policy."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryServer
from kv_transfer.identity import Incarnation, RequestId, TransferId, WorkerId, new_incarnation, pack_tokens
from kv_transfer.link import Link, LinkServer, Party, dial
from kv_transfer.messages import (
    Cancel,
    Closed,
    Failed,
    FinishReason,
    Gone,
    Message,
    OpenSink,
    PartyKind,
    Ping,
    SamplingParameters,
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

WIRE = WireConfig()


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    have_tokens: int = 0
    failure: Failed | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class LinkRouter:
    """A directory and a gateway in one. Use it on one event loop."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._me = Party(PartyKind.GATEWAY, "router", new_incarnation())
        self._directory = DirectoryServer(config=WIRE)
        supervisor = Party(PartyKind.SUPERVISOR, "directory", new_incarnation())
        self._server = LinkServer(secret, supervisor, self._directory.accept, "127.0.0.1", config=WIRE)
        self.loads: dict[WorkerId, WorkerLoad] = {}
        self._links: dict[WorkerId, Link] = {}
        self._inboxes: dict[TransferId, asyncio.Queue[Message | TokenDelta]] = {}
        self._numbers = itertools.count()

    async def start(self) -> int:
        """Listen; the directory's port."""
        await self._server.start()
        return self._server.port

    async def close(self) -> None:
        for link in self._links.values():
            link.close()
        await self._server.close()

    def entry(self, worker_id: str) -> WorkerEntry | None:
        return next((entry for entry in self._directory.table.entries if entry.address.worker_id == worker_id), None)

    async def wait_for_pair(self, prefill: str, decode: str, timeout_s: float = 60.0) -> None:
        """Wait until both serve and the pair is up, then connect to both."""
        async with asyncio.timeout(timeout_s):
            while not self._is_up(prefill, decode):  # noqa: ASYNC110 - the table is looked at, nobody sets an event
                await asyncio.sleep(0.05)
        for name in (prefill, decode):
            entry = self.entry(name)
            assert entry is not None
            link = await dial(self._secret, self._me, entry.address.host, entry.address.port, config=WIRE)
            link.on_message = partial(self._receive, WorkerId(name))
            link.on_closed = lambda _reason: None
            self._links[WorkerId(name)] = link

    def _is_up(self, prefill: str, decode: str) -> bool:
        source, sink = self.entry(prefill), self.entry(decode)
        if source is None or sink is None or {source.state, sink.state} != {WorkerState.SERVING}:
            return False
        return any(pair.worker_id == prefill and pair.up for pair in sink.pairs)

    async def wait_until_quiescent(self, *names: str, timeout_s: float = 20.0) -> None:
        """Wait until each worker says, from now on, that nobody holds a block or a transfer there; they speak every second."""
        self.loads.clear()
        async with asyncio.timeout(timeout_s):
            while not all(self._is_quiescent(name) for name in names):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)

    def _is_quiescent(self, name: str) -> bool:
        load = self.loads.get(WorkerId(name))
        if load is None:
            return False
        whole = load.blocks_free + load.blocks_cached + load.blocks_quarantined == load.blocks_total
        return whole and load.blocks_held == 0 and load.num_transfers == 0

    async def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParameters,
        *,
        decode: str,
        prefill: str | None,
        emitted: Sequence[int] = (),
        cancel_after_tokens: int | None = None,
        cancel_after_s: float | None = None,
        is_left: bool = False,
        salt: bytes = b"",
    ) -> Answer:
        """One attempt. prefill None: the decode worker computes the prompt itself. is_left: a worker will be gone, wait for no CLOSED."""
        sink, source = self.entry(decode), self.entry(prefill) if prefill is not None else None
        assert sink is not None
        source_incarnation = source.address.incarnation if source is not None else Incarnation(0)
        transfer = TransferId(RequestId(f"r{next(self._numbers)}"), 1, source_incarnation, sink.address.incarnation)
        self._inboxes[transfer] = asyncio.Queue()
        tokens = pack_tokens([*prompt, *emitted])
        address = source.address if source is not None else None
        opened = OpenSink(transfer, tokens, len(prompt), len(emitted), salt, sampling, 0, 60.0, address)
        answer = Answer()
        legs = [name for name in (decode, prefill) if name is not None]
        try:
            async with asyncio.timeout(cancel_after_s):
                await self._open(opened, decode, answer)
                if source is not None and answer.failure is None:
                    start = StartSource(
                        transfer, tokens, len(prompt), len(emitted), answer.have_tokens, salt, sampling, 0, 60.0, sink.address
                    )
                    self._post(source.address.worker_id, start)
                await self._collect(transfer, answer, len(emitted), cancel_after_tokens)
        except TimeoutError:
            assert cancel_after_s is not None, "nobody set a limit"
        if not is_left:
            await self._leave(transfer, legs, "done" if answer.finish is not None else "abort")
        del self._inboxes[transfer]
        return answer

    async def start_only(self, prompt: Sequence[int], sampling: SamplingParameters, *, prefill: str) -> None:
        """Give a prefill worker a prompt for a decode worker that does not exist."""
        async with asyncio.timeout(30):
            while (source := self.entry(prefill)) is None or source.state is not WorkerState.SERVING:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        link = await dial(self._secret, self._me, source.address.host, source.address.port, config=WIRE)
        link.on_closed = lambda _reason: None
        self._links[WorkerId(prefill)] = link
        sink = WorkerAddress(WorkerId("nobody"), Incarnation(3), "127.0.0.1", 1)
        transfer = TransferId(RequestId(f"r{next(self._numbers)}"), 1, source.address.incarnation, sink.incarnation)
        link.post(StartSource(transfer, pack_tokens(prompt), len(prompt), 0, 0, b"", sampling, 0, 60.0, sink))

    async def _open(self, message: OpenSink, decode: str, answer: Answer) -> None:
        inbox = self._inboxes[message.transfer]
        self._post(decode, message)
        said = await inbox.get()
        assert not isinstance(said, SinkBusy), "the test asks for more than fits"
        if isinstance(said, Failed):
            answer.failure = said
            return
        assert isinstance(said, SinkReady)
        answer.have_tokens = said.have_tokens

    async def _collect(self, transfer: TransferId, answer: Answer, first_index: int, cancel_after_tokens: int | None) -> None:
        inbox = self._inboxes[transfer]
        while answer.finish is None and answer.failure is None:
            if cancel_after_tokens is not None and len(answer.tokens) >= cancel_after_tokens:
                return
            said = await inbox.get()
            if isinstance(said, TokenDelta):
                assert said.first_index == first_index + len(answer.tokens), "a token is missing or said twice"
                answer.tokens.extend(said.tokens)
                answer.logprobs.extend(said.logprobs)
                answer.prompt_logprobs.extend(said.prompt_logprobs)
                answer.finish = said.finish
                answer.num_cached_tokens = said.num_cached_tokens
            elif isinstance(said, Failed):
                answer.failure = said

    async def _leave(self, transfer: TransferId, legs: list[str], reason: str) -> None:
        """CANCEL until every leg has let go."""
        inbox = self._inboxes[transfer]
        for name in legs:
            self._post(name, Cancel(transfer, reason))
        left = len(legs)
        while left:
            said = await inbox.get()
            left -= isinstance(said, Closed | Gone)

    def _post(self, worker_id: str, message: Message) -> None:
        self._links[WorkerId(worker_id)].post(message)

    def _receive(self, worker_id: WorkerId, message: Message) -> None:
        if isinstance(message, Ping):
            if message.load is not None:
                self.loads[worker_id] = message.load
        elif isinstance(message, Tokens):
            for delta in message.deltas:
                self._give(delta.transfer, delta)
        elif (transfer := getattr(message, "transfer", None)) is not None:
            self._give(transfer, message)

    def _give(self, transfer: TransferId, message: Message | TokenDelta) -> None:
        if transfer in self._inboxes:
            self._inboxes[transfer].put_nowait(message)
