"""Prefill and decode workers, their wire and a router in one thread and in virtual time: every turn is the test's choice.

The workers are the real engines, sessions and pools around a toy model and a loopback transport; only sockets, threads and the
pair handshake are missing (tests/conformance/test_worker_pair.py has those).
"""

import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from decode_worker.config import DecodeConfig
from decode_worker.engine import DecodeEngine
from decode_worker.reads import Reads
from decode_worker.receiver import Receiver
from decode_worker.sequences import DecodeSequences
from decode_worker.token_outbox import TokenOutbox
from glm_runtime.engine.grammar_desk import GrammarDesk
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_holders import StepHolders
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import TransferError
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_peer
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId, RequestId, TransferId, WorkerId, pack_tokens
from kv_transfer.link import Party
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
    PartyKind,
    SamplingParameters,
    SinkBusy,
    SinkReady,
    StartSource,
    TokenLogprobs,
    Tokens,
    WorkerAddress,
)
from kv_transfer.pairing import PairTerms
from kv_transfer.sink_session import SinkSession
from kv_transfer.source_session import SourceSession
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from kv_transfer.transports.ranks import LocalRank
from prefill_worker.config import PrefillConfig
from prefill_worker.engine import PrefillEngine
from prefill_worker.sender import Sender
from prefill_worker.sequences import PrefillSequences
from tests.fakes.toy_model import ToyRunner, make_toy_model
from tests.probing import read_probe

TIMERS = ProtocolTimers(credit_output_tokens=16)


class Wire:
    """One queue per direction: messages of a connection keep their order, those of different ones do not."""

    def __init__(self) -> None:
        self.queues: dict[tuple[PeerId, PeerId], deque[Message]] = {}
        self.sent: list[tuple[PeerId, PeerId, Message]] = []

    def post(self, sender: Party, to: PeerId, message: Message) -> None:
        self.queues.setdefault((sender.peer_id, to), deque()).append(message)
        self.sent.append((sender.peer_id, to, message))

    def busy(self) -> list[tuple[PeerId, PeerId]]:
        """Directions with something in flight."""
        return [key for key, queue in self.queues.items() if queue]


class BenchOutside:
    """What a role asks of its shell, on the bench's wire."""

    def __init__(self, me: Party, wire: Wire) -> None:
        self.me = me
        self.is_woken = True
        self._wire = wire

    def send(self, peer: PeerId, message: Message) -> None:
        self._wire.post(self.me, peer, message)

    def wake(self) -> None:
        self.is_woken = True

    def report(self) -> None: ...

    def drain(self) -> None: ...

    def keep(self, address: WorkerAddress) -> None: ...

    def forget(self, worker_id: WorkerId) -> None: ...

    def fault(self, error: BaseException) -> None:
        raise error


@dataclass
class Step:
    """A step that was launched and not published."""

    plan: Any
    result: Any = None


class BenchWorker:
    """The four verbs, one at a time: `launch` is take, decide and perhaps run; `land` is perhaps run, and publish.

    Like `EngineLoop`, one that had nothing to do decides again only when it has been woken.
    """

    engine: Any
    me: Party
    outside: BenchOutside

    def __init__(self) -> None:
        self.step: Step | None = None

    def launch(self, now_s: float) -> bool:
        """False when there is nothing to compute, a step is in flight, or the loop sleeps."""
        if self.step is not None or not self.outside.is_woken:
            return False
        self.outside.is_woken = False
        self.engine.take_commands(now_s)
        plan = self.engine.decide(now_s)
        if plan is not None:
            self.outside.is_woken = True
            self.step = Step(plan)
        return plan is not None

    def run(self) -> None:
        """The engine thread stores and reads, some time between launch and land."""
        if self.step is not None and self.step.result is None:
            self.step.result = self.engine.run(self.step.plan)

    def land(self, now_s: float) -> None:
        """Publish the step in flight, if any."""
        self.run()
        if self.step is not None:
            step, self.step = self.step, None
            self.engine.publish(step.plan, step.result, now_s)

    def turn(self, now_s: float) -> bool:
        """One whole step."""
        launched = self.launch(now_s)
        self.land(now_s)
        return launched


def bench_transport(
    fabric: LoopbackFabric, me: Party, model: LoadedModel, owner_of: Callable[[BlockId], Hashable] = lambda _block_id: None
) -> GroupTransport:
    """A transport of all ranks, as a worker has it. owner_of: of group-wide ids."""
    assert isinstance(model.runner, ToyRunner)
    sharding = model.sharding

    def owner_on(rank: int) -> Callable[[BlockId], Hashable]:
        return lambda local_id: owner_of(sharding.group_id(rank % sharding.num_homes, local_id))

    ranks = [
        LocalRank(
            LoopbackTransport(
                fabric,
                rank_peer(me.peer_id, rank),
                memory,
                num_components=len(model.layout.components),
                owner_of=owner_on(rank),
            ),
            memory,
        )
        for rank, memory in enumerate(model.runner.memories)
    ]
    return GroupTransport(ranks, sharding)


class PrefillBench(BenchWorker):
    def __init__(
        self,
        number: int,
        wire: Wire,
        fabric: LoopbackFabric,
        *,
        num_blocks: int,
        max_step_tokens: int,
        config: PrefillConfig,
        max_drafts: int = 0,
        sharding: CacheSharding = ONE_RANK,
    ) -> None:
        super().__init__()
        self.me = Party(PartyKind.PREFILL, f"prefill-{number}", Incarnation(1000 + number))
        self.model = make_toy_model(
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            incarnation=self.me.incarnation,
            max_drafts=max_drafts,
            sharding=sharding,
        )
        self.transport = bench_transport(fabric, self.me, self.model)
        holders = StepHolders(self.model.pool)
        self.sequences = PrefillSequences(self.model.pool, holders)
        self.session = SourceSession(self.model.pool, self.me.incarnation, TIMERS, self.model.layout.component_mask, sharding)
        self.outside = BenchOutside(self.me, wire)
        self.sender = Sender(
            self.session,
            self.sequences,
            self.outside,
            layout=self.model.layout,
            request_limits=self.model.request_limits,
            config=config,
            grammars=GrammarDesk(self.model.grammars, lambda: 0.0),
        )
        self.engine = PrefillEngine(self.model, self.sequences, holders, self.sender, config)

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(WorkerId(self.me.party_id), self.me.incarnation, "bench", 1)

    def receive(self, sender: PeerId, message: Message, now_s: float) -> None:
        if isinstance(message, StartSource):
            self.sender.start(sender, message, now_s)
        else:
            self.sender.receive(sender, message, now_s)

    def tick(self, now_s: float) -> None:
        self.sender.tick(now_s)

    @property
    def num_live(self) -> int:
        return self.session.num_live


class BenchPairs:
    """Pairs that are made once by the bench; a destroyed agent is made anew at once."""

    def __init__(self, remake: Callable[[PeerId], None]) -> None:
        self._remake = remake
        self.suspected: list[PeerId] = []
        self.lost: set[PeerId] = set()

    def knows(self, peer: PeerId) -> bool:
        return peer not in self.lost

    def suspect(self, peer: PeerId) -> None:
        self.suspected.append(peer)

    def destroy(self, peer: PeerId) -> None:
        self._remake(peer)


class DecodeBench(BenchWorker):
    def __init__(
        self,
        number: int,
        wire: Wire,
        fabric: LoopbackFabric,
        sources: Sequence[PrefillBench],
        *,
        num_blocks: int,
        max_step_tokens: int,
        config: DecodeConfig,
        max_drafts: int = 0,
        sharding: CacheSharding = ONE_RANK,
    ) -> None:
        super().__init__()
        self.me = Party(PartyKind.DECODE, f"decode-{number}", Incarnation(2000 + number))
        self.model = make_toy_model(
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            incarnation=self.me.incarnation,
            max_drafts=max_drafts,
            sharding=sharding,
        )
        self.transport = bench_transport(fabric, self.me, self.model, self.model.pool.generation)
        self._sources = {source.me.peer_id: source for source in sources}
        self._ended: list[PeerId] = []
        self.reads = Reads(self, self.model.memory.block_bytes)  # type: ignore[arg-type]
        self.pairs = BenchPairs(self.destroy)
        holders = StepHolders(self.model.pool)
        self.sequences = DecodeSequences()
        self.session = SinkSession(
            self.model.pool,
            self.me.incarnation,
            TIMERS,
            self.model.layout,
            self.transport.destroying_proven,
            hidden_state_bytes=self.model.hidden_state_bytes,
            sharding=sharding,
        )
        self.outside = BenchOutside(self.me, wire)
        outbox = TokenOutbox(self.outside)
        self.receiver = Receiver(
            self.session,
            self.sequences,
            holders,
            outbox,
            self.outside,
            self.reads,
            self.pairs,  # type: ignore[arg-type]
            pool=self.model.pool,
            looks_one_token_ahead=self.model.layout.looks_one_token_ahead,
            request_limits=self.model.request_limits,
            config=config,
            grammars=GrammarDesk(self.model.grammars, lambda: 0.0),
        )
        self.engine = DecodeEngine(self.model, self.sequences, holders, self.receiver, outbox, config)
        for peer in self._sources:
            self._connect(peer)

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(WorkerId(self.me.party_id), self.me.incarnation, "bench", 1)

    # The transfer thread's surface, without a thread.

    def post(self, read: PostRead) -> None:
        self.transport.post_read(read)

    def destroy(self, peer: PeerId) -> None:
        self.transport.destroy_peer(peer)
        self._ended.append(peer)

    def _connect(self, peer: PeerId) -> None:
        source = self._sources[peer]
        self.transport.open_peer(peer)
        terms = PairTerms.of_pool(source.model.layout, "toy", source.model.memory, sharding=source.model.sharding)
        self.transport.connect_peer(peer, terms.offer(source.transport.open_peer(self.me.peer_id)))
        read_probe(self.transport, peer, source.me.incarnation, 1.0)

    def receive(self, sender: PeerId, message: Message, now_s: float) -> None:
        match message:
            case OpenSink():
                self.receiver.open(sender, message, now_s)
            case Ask():
                self.receiver.ask(sender, message, now_s)
            case _:
                self.receiver.receive(sender, message, now_s)

    def tick(self, now_s: float) -> None:
        """READs that have ended, agents that are gone, timers."""
        for outcome in self.transport.poll():
            if outcome.error is None:
                self.reads.done(outcome.read_id, now_s)
                self.receiver.read_done(outcome.read_id, now_s)
            else:
                self.reads.failed(outcome.read_id)
                self.receiver.read_failed(outcome.read_id, TransferError(str(outcome.error)), now_s)
        ended, self._ended = self._ended, []
        for peer in ended:
            self.reads.ended(peer)
            self.receiver.agent_destroyed(peer, now_s)
            self._connect(peer)
        self.receiver.tick(now_s)

    @property
    def num_live(self) -> int:
        return self.session.num_live


@dataclass
class BenchRequest:
    """A request as its router sees it."""

    request_id: RequestId
    prompt: list[int]
    sampling: SamplingParameters
    is_local: bool = False
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: Failed | None = None
    is_cancelled: bool = False
    attempt: int = 0
    transfer: TransferId | None = None
    need_from: int | None = None
    not_before_s: float = 0.0
    num_cached_tokens: int = 0
    said_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def sampling_now(self) -> SamplingParameters:
        """The prompt is scored on the way to the first token."""
        return msgspec.structs.replace(self.sampling, prompt_logprobs=-1) if self.output else self.sampling

    @property
    def salt(self) -> bytes:
        """As the router: nothing of a prompt that is scored may come from a cache."""
        return f"{self.request_id} {self.attempt}".encode() if self.sampling_now.prompt_logprobs >= 0 else b""

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None or self.is_cancelled


class BenchRouter:
    """Opens attempts, takes tokens from the current one at the next index, and tries again when told to."""

    def __init__(self, wire: Wire, prefills: Sequence[PrefillBench], decodes: Sequence[DecodeBench], rng: random.Random) -> None:
        self.me = Party(PartyKind.GATEWAY, "gateway-0", Incarnation(1))
        self.requests: dict[RequestId, BenchRequest] = {}
        self._wire = wire
        self._prefills = prefills
        self._decodes = decodes
        self._rng = rng
        self._placed: dict[TransferId, tuple[PrefillBench | None, DecodeBench]] = {}
        self._leaving: dict[tuple[TransferId, PeerId], str] = {}

    def submit(self, request: BenchRequest) -> BenchRequest:
        self.requests[request.request_id] = request
        return request

    def cancel(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        if not request.is_over:
            request.is_cancelled = True
            self._leave(request, "abort")

    def tick(self, now_s: float) -> None:
        """Open what waits, ask for what is late, repeat what was not answered."""
        for (transfer, peer), reason in self._leaving.items():
            self._wire.post(self.me, peer, Cancel(transfer, reason))
        for request in self.requests.values():
            if request.is_over:
                continue
            if request.transfer is None:
                if now_s >= request.not_before_s:
                    self._open(request, now_s)
            elif now_s - request.said_s >= 1.0:
                self._repeat(request, now_s)

    def receive(self, sender: PeerId, message: Message, now_s: float) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                self._take(delta.transfer, delta, now_s)
            return
        transfer = getattr(message, "transfer", None)
        if isinstance(message, Closed | Gone):
            self._leaving.pop((transfer, sender), None)
        request = next((request for request in self.requests.values() if request.transfer == transfer), None)
        if request is None or transfer is None or request.is_over:
            return
        match message:
            case SinkReady():
                request.need_from = message.have_tokens
                self._start(request, now_s)
            case SinkBusy():
                self._retry(request, now_s + message.retry_after_s, "busy")
            case Failed(kind=FailureKind.REQUEST_FAULT | FailureKind.FATAL):
                request.failure = message
                self._leave(request, "failed")
            case Failed() | Gone() | Closed():
                if sender == self._placed[transfer][1].me.peer_id or isinstance(message, Failed):
                    self._retry(request, now_s + 0.05, "retry")

    def _open(self, request: BenchRequest, now_s: float) -> None:
        request.attempt += 1
        decode = self._rng.choice(list(self._decodes))
        prefill = None if request.is_local else self._rng.choice(list(self._prefills))
        source_incarnation = prefill.me.incarnation if prefill is not None else Incarnation(0)
        transfer = TransferId(request.request_id, request.attempt, source_incarnation, decode.me.incarnation)
        request.transfer, request.need_from = transfer, None
        self._placed[transfer] = (prefill, decode)
        self._say_open(request, now_s)

    def _say_open(self, request: BenchRequest, now_s: float) -> None:
        assert request.transfer is not None
        prefill, decode = self._placed[request.transfer]
        request.said_s = now_s
        message = OpenSink(
            request.transfer,
            pack_tokens(request.prompt + request.output),
            len(request.prompt),
            len(request.output),
            request.salt,
            request.sampling_now,
            0,
            1000.0,
            prefill.address if prefill is not None else None,
        )
        self._wire.post(self.me, decode.me.peer_id, message)

    def _start(self, request: BenchRequest, now_s: float) -> None:
        assert request.transfer is not None
        assert request.need_from is not None
        prefill, decode = self._placed[request.transfer]
        request.said_s = now_s
        if prefill is None:
            return
        message = StartSource(
            request.transfer,
            pack_tokens(request.prompt + request.output),
            len(request.prompt),
            len(request.output),
            request.need_from,
            request.salt,
            request.sampling_now,
            0,
            1000.0,
            decode.address,
        )
        self._wire.post(self.me, prefill.me.peer_id, message)

    def _repeat(self, request: BenchRequest, now_s: float) -> None:
        assert request.transfer is not None
        _, decode = self._placed[request.transfer]
        request.said_s = now_s
        if request.need_from is None:
            self._say_open(request, now_s)
        else:
            self._wire.post(self.me, decode.me.peer_id, Ask(request.transfer, len(request.output)))

    def _take(self, transfer: TransferId, delta: Any, now_s: float) -> None:
        request = next((request for request in self.requests.values() if request.transfer == transfer), None)
        if request is None or request.is_over:
            return
        known = len(request.output) - delta.first_index
        assert known >= 0, "a token is missing"
        request.said_s = now_s
        request.num_cached_tokens = delta.num_cached_tokens
        if delta.tokens and not request.output:
            request.prompt_logprobs = list(delta.prompt_logprobs)
        request.output.extend(delta.tokens[known:])
        request.logprobs.extend(delta.logprobs[known:])
        if delta.finish is not None:
            request.finish = delta.finish
            self._leave(request, "done")

    def _retry(self, request: BenchRequest, at_s: float, reason: str) -> None:
        self._leave(request, reason)
        request.not_before_s = at_s

    def _leave(self, request: BenchRequest, reason: str) -> None:
        if request.transfer is None:
            return
        prefill, decode = self._placed[request.transfer]
        for worker in (prefill, decode):
            if worker is not None:
                self._leaving[request.transfer, worker.me.peer_id] = reason
                self._wire.post(self.me, worker.me.peer_id, Cancel(request.transfer, reason))
        request.transfer = None

    @property
    def is_quiet(self) -> bool:
        return not self._leaving and all(request.is_over for request in self.requests.values())


class World:
    """Everything, and the clock."""

    def __init__(
        self,
        *,
        seed: int = 0,
        prefill_blocks: int = 40,
        decode_blocks: int = 40,
        num_prefills: int = 1,
        num_decodes: int = 1,
        max_step_tokens: int = 32,
        prefill_config: PrefillConfig | None = None,
        decode_config: DecodeConfig | None = None,
        fabric: LoopbackFabric | None = None,
        max_drafts: int = 0,
        prefill_sharding: CacheSharding = ONE_RANK,
        decode_sharding: CacheSharding = ONE_RANK,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.wire = Wire()
        self.fabric = fabric or LoopbackFabric(seed=seed)
        self.prefills = [
            PrefillBench(
                number,
                self.wire,
                self.fabric,
                num_blocks=prefill_blocks,
                max_step_tokens=max_step_tokens,
                config=prefill_config or PrefillConfig(),
                max_drafts=max_drafts,
                sharding=prefill_sharding,
            )
            for number in range(num_prefills)
        ]
        self.decodes = [
            DecodeBench(
                number,
                self.wire,
                self.fabric,
                self.prefills,
                num_blocks=decode_blocks,
                max_step_tokens=max_step_tokens,
                config=decode_config or DecodeConfig(max_running=8, max_chunk_tokens=16),
                max_drafts=max_drafts,
                sharding=decode_sharding,
            )
            for number in range(num_decodes)
        ]
        self.router = BenchRouter(self.wire, self.prefills, self.decodes, self.rng)
        self._parties: dict[PeerId, Any] = {party.me.peer_id: party for party in (*self.prefills, *self.decodes, self.router)}

    @property
    def workers(self) -> list[Any]:
        return [*self.prefills, *self.decodes]

    def deliver_one(self, may_deliver: Callable[[PeerId, PeerId], bool] = lambda _sender, _to: True) -> bool:
        """One message of a randomly chosen connection arrives."""
        busy = [direction for direction in self.wire.busy() if may_deliver(*direction)]
        if not busy:
            return False
        sender, to = self.rng.choice(busy)
        message = self.wire.queues[sender, to].popleft()
        self._parties[to].receive(sender, message, self.now_s)
        return True

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.fabric.advance(seconds)
        for party in self._parties.values():
            party.tick(self.now_s)

    def turn(self) -> None:
        """Something happens somewhere."""
        worker = self.rng.choice(self.workers)
        action = self.rng.randrange(6)
        if action < 2:
            self.deliver_one()
        elif action == 2:
            worker.launch(self.now_s)
        elif action == 3:
            worker.run()
        elif action == 4:
            worker.land(self.now_s)
        else:
            self.pass_time(self.rng.choice([0.001, 0.01, 0.1]))

    def settle(self, max_turns: int = 20_000) -> None:
        """Go on in an orderly way until every request is over and everybody has let go."""
        for _ in range(max_turns):
            while self.deliver_one():
                pass
            for worker in self.workers:
                worker.land(self.now_s)
                worker.turn(self.now_s)
            if self.router.is_quiet and not self.wire.busy() and all(worker.num_live == 0 for worker in self.workers):
                break
            self.pass_time(0.05)
        else:
            over = {request.request_id: (request.is_over, len(request.output)) for request in self.router.requests.values()}
            raise AssertionError(f"not settled after {max_turns} turns: {over}, live {[worker.num_live for worker in self.workers]}")
        self.pass_time(0.2)
        self.assert_no_leaks()

    def assert_no_leaks(self) -> None:
        """I6: at quiescence free + cached + quarantined = pool, and nobody holds anything."""
        for worker in self.workers:
            audit = worker.model.pool.audit()
            assert audit.is_quiesced, f"{worker.me.party_id} leaks {audit}"
            assert audit.num_free + audit.num_cached + audit.num_quarantined == audit.num_blocks
        for decode in self.decodes:
            decode.session.audit()
            assert decode.session.num_reserved_blocks == 0
        assert self.fabric.foreign_bytes == []
