"""Every message between processes, as msgspec structs, versioned.

Knows: the fields, their types and how a message becomes bytes; what they say of a request is in `request_values.py`, of a
worker in `worker_values.py`, and both are imported from here. Does not know who may send what when (`handoff.py`), or how frames travel
(`wire.py`). All are idempotent; a message about an unknown transfer is answered `Gone`.

Adding a field with a default at the end is a minor change; anything else raises `layout.PROTOCOL_MAJOR`.
"""

from enum import Enum, unique

import msgspec

from kv_transfer.errors import ProtocolMismatch
from kv_transfer.grammar import GrammarKind as GrammarKind
from kv_transfer.grammar import GrammarSpec as GrammarSpec
from kv_transfer.identity import BlockId, Generation, Incarnation, PackedTokens, TransferId
from kv_transfer.layout import CacheLayout
from kv_transfer.request_values import FinishReason as FinishReason
from kv_transfer.request_values import HandoffRecord as HandoffRecord
from kv_transfer.request_values import LogprobsMode as LogprobsMode
from kv_transfer.request_values import SamplingParameters as SamplingParameters
from kv_transfer.request_values import TokenDelta as TokenDelta
from kv_transfer.request_values import TokenLogprobs as TokenLogprobs
from kv_transfer.worker_values import PairState as PairState
from kv_transfer.worker_values import WorkerAddress as WorkerAddress
from kv_transfer.worker_values import WorkerEntry as WorkerEntry
from kv_transfer.worker_values import WorkerLoad as WorkerLoad
from kv_transfer.worker_values import WorkerState as WorkerState


@unique
class PartyKind(Enum):
    """Who may open a control connection."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    SUPERVISOR = "supervisor"
    TOOL = "tool"


@unique
class FailureKind(Enum):
    """What the router may do about a failure. A request fault is never retried."""

    RETRYABLE_ELSEWHERE = "retryable_elsewhere"
    RETRYABLE_LATER = "retryable_later"
    REQUEST_FAULT = "request_fault"
    FATAL = "fatal"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=False):
    """Base of all messages: a tagged, immutable msgpack array."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the values that messages carry."""


# -- values --------------------------------------------------------------------------------------------------------------


class SealedBlock(_Part, frozen=True):
    """A block as it was sealed: where the bytes are and which use of the block they belong to."""

    block_id: BlockId
    generation: Generation
    rank: int = 0


class RankOffer(_Part, frozen=True):
    """What PeerOffer says of rank 0, of another rank: its agent for this pair and its pool."""

    agent_name: str
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    device_id: int = 0


class PeerOffer(_Part, frozen=True):
    """The part of HELLO that two workers exchange: what must agree, and where the pools lie.

    agent_metadata: the transport's description of this pair's own agent. base_address, block_bytes, num_blocks: the pool;
    block `num_blocks` is the probe block (`geometry.py`). All these are of rank 0, and `other_ranks` says the same of ranks 1, 2 ...
    num_homes: on how many homes the blocks lie (`geometry.CacheSharding`). numerics, kernels: in which mode and with which kernels the
    worker computes; empty where a worker does not say.
    """

    fingerprint: str
    layout: CacheLayout
    weights_version: str
    num_ranks: int
    agent_name: str
    agent_epoch: int
    agent_metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int = 0
    numerics: str = ""
    kernels: str = ""
    num_homes: int = 1
    other_ranks: tuple[RankOffer, ...] = ()


# -- opening a connection ------------------------------------------------------------------------------------------------


class Challenge(_Message, frozen=True):
    """First frame of both sides: a fresh nonce that the other must prove the shared secret with."""

    nonce: bytes
    protocol_major: int
    protocol_minor: int


class Hello(_Message, frozen=True):
    """Second frame of both sides: who speaks, and `proof`, an HMAC-SHA256 over role, identity and both nonces (`link.py`)."""

    kind: PartyKind
    party_id: str
    incarnation: Incarnation
    proof: bytes


class PairHello(_Message, frozen=True):
    """Decode -> prefill and back: build the transport of this pair. Repeated with a higher epoch to re-make an agent."""

    offer: PeerOffer


class PairRefused(_Message, frozen=True):
    """The pair cannot be used; `reason` is for the operator."""

    code: str
    reason: str


# -- a hand-off ----------------------------------------------------------------------------------------------------------


class OpenSink(_Message, frozen=True):
    """router -> decode. `tokens` are prompt then emitted; deadline_s is time left, as clocks differ between hosts."""

    transfer: TransferId
    tokens: PackedTokens
    num_prompt_tokens: int
    first_index: int
    cache_salt: bytes
    sampling: SamplingParameters
    priority: int
    deadline_s: float
    source: WorkerAddress | None


class SinkReady(_Message, frozen=True):
    """decode -> router. The first `have_tokens` are pinned on the sink; `credit_blocks` are its to fill."""

    transfer: TransferId
    have_tokens: int
    credit_blocks: int


class SinkBusy(_Message, frozen=True):
    """decode -> router. No credit now; the router cancels this attempt and tries elsewhere or later."""

    transfer: TransferId
    retry_after_s: float


class StartSource(_Message, frozen=True):
    """router -> prefill. Compute the tokens, send what lies at or after `need_from`."""

    transfer: TransferId
    tokens: PackedTokens
    num_prompt_tokens: int
    first_index: int
    need_from: int
    cache_salt: bytes
    sampling: SamplingParameters
    priority: int
    deadline_s: float
    sink: WorkerAddress


class Progress(_Message, frozen=True):
    """prefill -> decode, router. Refreshes the no-progress timer; sent until RELEASED so that a lost COMPLETE is noticed."""

    transfer: TransferId
    state: str
    num_computed_tokens: int
    queue_position: int
    num_sealed_chunks: int


class Seal(_Message, frozen=True):
    """prefill -> decode. Chunk `chunk` holds tokens [start, end) in `blocks`; all components named in `component_mask`."""

    transfer: TransferId
    chunk: int
    start: int
    end: int
    blocks: tuple[SealedBlock, ...]
    component_mask: int
    layer_range: tuple[int, int] | None = None
    digests: tuple[tuple[int, ...], ...] = ()


class Complete(_Message, frozen=True):
    """prefill -> decode. There are `num_chunks` chunks, and here is the record."""

    transfer: TransferId
    num_chunks: int
    record: HandoffRecord


class Resend(_Message, frozen=True):
    """decode -> prefill. Say SEAL of these chunks again, or COMPLETE."""

    transfer: TransferId
    chunks: tuple[int, ...]
    record: bool


class Validate(_Message, frozen=True):
    """decode -> prefill, after READ `read_number` is DONE on every rank: do these blocks still carry these generations?"""

    transfer: TransferId
    chunk: int
    read_number: int
    blocks: tuple[SealedBlock, ...]


class Valid(_Message, frozen=True):
    """prefill -> decode. They do."""

    transfer: TransferId
    chunk: int
    read_number: int


class Stale(_Message, frozen=True):
    """prefill -> decode. They do not: what was read is worthless."""

    transfer: TransferId
    chunk: int
    read_number: int


class Taken(_Message, frozen=True):
    """decode -> prefill. These chunks are committed; the record is in hand or not."""

    transfer: TransferId
    chunks: tuple[int, ...]
    record: bool


class Keep(_Message, frozen=True):
    """decode -> prefill. These transfers live: renew their leases."""

    transfers: tuple[TransferId, ...]


class Cancel(_Message, frozen=True):
    """Any -> any. Drive the transfer to its end; repeated until Closed, Gone or a new incarnation answers."""

    transfer: TransferId
    reason: str


class Closed(_Message, frozen=True):
    """The transfer has no holder left here."""

    transfer: TransferId
    reason: str


class Gone(_Message, frozen=True):
    """The transfer is unknown here. In answer to `about="validate"` it means Stale of that chunk's READ, else Cancel."""

    transfer: TransferId
    about: str
    chunk: int = -1
    read_number: int = -1


class Failed(_Message, frozen=True):
    """prefill, decode -> router, peer. `message` is safe to show to a client only for a request fault."""

    transfer: TransferId
    kind: FailureKind
    code: str
    message: str


class Tokens(_Message, frozen=True):
    """decode -> router: one frame per engine step and gateway."""

    deltas: tuple[TokenDelta, ...]


class Ask(_Message, frozen=True):
    """router -> decode, which is silent though it owns the next step: send again from `next_index`, or say Gone."""

    transfer: TransferId
    next_index: int


# -- liveness and directory ----------------------------------------------------------------------------------------------


class Ping(_Message, frozen=True):
    """Every second on every connection; five seconds of silence end it."""

    load: WorkerLoad | None = None
    pairs: tuple[PairState, ...] = ()
    state: WorkerState | None = None


class Report(_Message, frozen=True):
    """worker -> directory: this is my row."""

    entry: WorkerEntry


class Subscribe(_Message, frozen=True):
    """Any -> directory: push me the worker table, now and on every change."""


class WorkerTable(_Message, frozen=True):
    """directory -> subscriber: the whole table; a subscriber keeps the last one when the directory is gone."""

    version: int
    entries: tuple[WorkerEntry, ...]


class DrainWorker(_Message, frozen=True):
    """supervisor -> worker: accept nothing new, finish what runs, go QUIET."""

    deadline_s: float


class WantWave(_Message, frozen=True):
    """worker -> the gate of its replica: steps are needed; nobody here has been called to this wave of them."""

    wave: int


class BeginWave(_Message, frozen=True):
    """gate -> every worker of the replica: make steps until nobody has rows in one."""

    wave: int


Message = (
    Challenge | Hello | PairHello | PairRefused | OpenSink | SinkReady | SinkBusy | StartSource | Progress | Seal | Complete
    | Resend | Validate | Valid | Stale | Taken | Keep | Cancel | Closed | Gone | Failed | Tokens | Ask | Ping | Report
    | Subscribe | WorkerTable | DrainWorker | WantWave | BeginWave
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message as msgpack."""
    return _ENCODER.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """Inverse of `encode`. Raises ProtocolMismatch for an unknown message, a missing field or a wrong type."""
    try:
        return _DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(f"a frame of {len(frame)} bytes is no message of protocol 1: {error}") from error
