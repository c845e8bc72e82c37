"""Whole roles of workers on the control loop, without model and network: all that a step does there is real.

A role is made as the shell makes it, with its session, its pool and its transfer thread, which has nothing to do. The model is an outcome
that is written down before the clock runs; messages to others are dropped where the shell would write them to a socket.
"""

import random
from collections.abc import Sequence

from decode_worker.config import DecodeConfig
from decode_worker.role import DecodeRole
from glm_runtime.engine.calibration import MeasuredCosts
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.request_check import RequestLimits
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.engine.worker_config import WorkerNetwork
from kv_transfer.block_pool import BlockPool
from kv_transfer.identity import Incarnation, PeerId, RequestId, TransferId, WorkerId, pack_tokens
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.link import Party
from kv_transfer.messages import Message, OpenSink, PartyKind, SamplingParameters, StartSource, WorkerAddress
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from prefill_worker.config import PrefillConfig
from prefill_worker.role import PrefillRole

BLOCK_SIZE_TOKENS = 64
VOCAB_SIZE = 154_880
CONTEXT_TOKENS = 8192
MAX_TOKENS = 2048
STOP_IDS = (154_820, 154_827, 154_829)
CHUNK_TOKENS = 512
MAX_DRAFTS = 5
HELD_SHARES = (0.84, 0.79, 0.74, 0.69, 0.82)
"""Of the drafts whose forerunners all held, by position: acceptance lengths as published for GLM-5.2 on code."""

GATEWAY = Party(PartyKind.GATEWAY, "gateway", Incarnation(1))
DECODE = Party(PartyKind.DECODE, "decode", Incarnation(2))
PREFILL = Party(PartyKind.PREFILL, "prefill", Incarnation(3))
PLAIN = (CacheComponent("mla", (0,), 8, "bench"), CacheComponent("index_key", (0,), 8, "bench"))
WITH_MTP = (*PLAIN, CacheComponent("mtp_mla", (1,), 8, "bench", keyed_by_next_token=True))
COSTS = MeasuredCosts(
    target=dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.02),
    first=dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.0005),
    further=dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.0004),
)
"""Steps that are bound by reading weights, so that all drafts pay."""


class Dropped:
    """What a role asks of its shell; nothing goes out."""

    def send(self, peer: PeerId, message: Message) -> None: ...
    def keep(self, address: WorkerAddress) -> None: ...
    def forget(self, worker_id: WorkerId) -> None: ...
    def wake(self) -> None: ...
    def report(self) -> None: ...
    def drain(self) -> None: ...

    def fault(self, error: BaseException) -> None:
        raise error


class NoModel:
    """Nothing is run."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raises AssertionError."""
        raise AssertionError(f"step {plan.step_number} is run, and there is no model")


class Outcomes:
    """What a model would answer: drafts of which as many hold as is usual, and tokens that never end a request."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def of(self, plan: StepPlan) -> StepResult:
        """A result for the plan."""
        return StepResult(
            step_number=plan.step_number,
            samples={piece.sequence_id: self._run(piece) for piece in plan.slices if piece.sampling is not None},
            drafts={piece.sequence_id: self._tokens(piece.num_next_drafts) for piece in plan.slices if piece.num_next_drafts},
            target_s=0.020,
            draft_s=0.002,
        )

    def _run(self, piece: SequenceSlice) -> tuple[int, ...]:
        held = []
        for draft, share in zip(piece.tokens[piece.num_given :], HELD_SHARES, strict=False):
            if self._rng.random() >= share:
                break
            held.append(draft)
        return (*held, *self._tokens(1))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(100_000) for _ in range(count))


def make_decode_role(num_requests: int, max_drafts: int) -> DecodeRole:
    """A decode role in which so many requests of about CONTEXT_TOKENS decode. Call it on an event loop."""
    model = _model(num_requests, WITH_MTP if max_drafts else PLAIN, DECODE, max_drafts=max_drafts)
    config = DecodeConfig(max_running=num_requests, max_chunk_tokens=model.max_step_tokens)
    transport = LoopbackTransport(LoopbackFabric(), DECODE.peer_id, model.memory, num_components=len(model.layout.components))
    role = DecodeRole(model, Dropped(), DECODE, config, WorkerNetwork(), transport)
    for number, prompt in enumerate(_prompts(num_requests)):
        transfer = TransferId(RequestId(f"chatcmpl-{number:032x}"), 1, Incarnation(0), DECODE.incarnation)
        role.receive(GATEWAY, OpenSink(transfer, pack_tokens(prompt), len(prompt), 0, b"", _sampling(number), 0, 600.0, None), 0.0)
    outcomes = Outcomes(0)
    while role.load().num_running < num_requests:
        plan = role.decide(0.0)
        assert plan is not None, "nobody computes the prompts"
        role.publish(plan, outcomes.of(plan), 0.1)
    return role


def make_prefill_role(num_requests: int) -> PrefillRole:
    """A prefill role with so many prompts to compute, CHUNK_TOKENS of each in a step. Call it on an event loop."""
    model = _model(num_requests, WITH_MTP, PREFILL, max_step_tokens=num_requests * CHUNK_TOKENS)
    transport = LoopbackTransport(LoopbackFabric(), PREFILL.peer_id, model.memory, num_components=len(model.layout.components))
    role = PrefillRole(model, Dropped(), PREFILL, PrefillConfig(max_computing=num_requests), WorkerNetwork(), transport)
    sink = WorkerAddress(WorkerId(DECODE.party_id), DECODE.incarnation, "bench", 1)
    for number, prompt in enumerate(_prompts(num_requests)):
        transfer = TransferId(RequestId(f"chatcmpl-{number:032x}"), 1, PREFILL.incarnation, DECODE.incarnation)
        message = StartSource(transfer, pack_tokens(prompt), len(prompt), 0, 0, b"", _sampling(number), 0, 600.0, sink)
        role.receive(GATEWAY, message, 0.0)
    return role


def _model(
    num_requests: int, components: tuple[CacheComponent, ...], owner: Party, *, max_drafts: int = 0, max_step_tokens: int | None = None
) -> LoadedModel:
    num_blocks = num_requests * (-(-(CONTEXT_TOKENS + MAX_TOKENS) // BLOCK_SIZE_TOKENS) + 2)
    layout = CacheLayout(BLOCK_SIZE_TOKENS, components, "bench", "bench")
    memory = PoolMemory(num_blocks, layout.block_bytes)
    memory.write_probe(owner.incarnation)
    return LoadedModel(
        runner=NoModel(),
        layout=layout,
        weights_version="bench",
        memory=memory,
        pool=BlockPool(num_blocks, BLOCK_SIZE_TOKENS),
        request_limits=RequestLimits(vocab_size=VOCAB_SIZE, max_model_len_tokens=1 << 20, capacity_tokens=num_blocks * BLOCK_SIZE_TOKENS),
        max_step_tokens=max_step_tokens or num_requests * (CONTEXT_TOKENS + BLOCK_SIZE_TOKENS),
        max_drafts=max_drafts,
        adapts_drafts=max_drafts > 0,
        measured_costs=COSTS if max_drafts else MeasuredCosts(),
    )


def _prompts(num_requests: int) -> Sequence[list[int]]:
    """Different tokens, and lengths that end anywhere in a block."""
    rng = random.Random(0)
    return [[rng.randrange(100_000) for _ in range(CONTEXT_TOKENS - rng.randrange(BLOCK_SIZE_TOKENS))] for _ in range(num_requests)]


def _sampling(number: int) -> SamplingParameters:
    return SamplingParameters(max_tokens=MAX_TOKENS, seed=number, temperature=1.0, top_p=0.95, stop_token_ids=STOP_IDS)
