"""The life-cycles of a hand-off as tables, and the effects that the two ends ask their worker for.

Knows: which state may follow which, and what can be asked of the shell around a session. Does not know when
(`source_handoff.py`, `sink_handoff.py`), for how many transfers (`source_session.py`, `sink_session.py`), or how anything is carried out.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeVar

import msgspec

from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, PeerId, TransferId
from kv_transfer.messages import Failed, HandoffRecord, Message

RECORD_SCHEMA = 2

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class IllegalTransition(RuntimeError):
    """Our bug: an event that the table does not allow in this state."""


def advance(table: Mapping[StateT, Mapping[EventT, StateT]], state: StateT, event: EventT) -> StateT:
    """The state after `event`. Raises IllegalTransition when the table has no such entry."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(f"{type(state).__name__} is {state.value}: {event.value} is not possible now") from None


# -- source transfer ---------------------------------------------------------------------------------------------------


@unique
class SourceState(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    SEALED = "sealed"
    COMPLETE = "complete"
    RELEASED = "released"


@unique
class SourceEvent(Enum):
    COMPUTE_STARTED = "compute_started"
    CHUNK_SEALED = "chunk_sealed"
    COMPLETED = "completed"
    ALL_TAKEN = "all_taken"
    LEASE_ENDED = "lease_ended"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    PEER_LOST = "peer_lost"
    DEADLINE_PASSED = "deadline_passed"


_SOURCE_ENDS = {
    SourceEvent.CANCELLED: SourceState.RELEASED,
    SourceEvent.SUPERSEDED: SourceState.RELEASED,
    SourceEvent.FAILED: SourceState.RELEASED,
    SourceEvent.PEER_LOST: SourceState.RELEASED,
    SourceEvent.DEADLINE_PASSED: SourceState.RELEASED,
}

SOURCE_TRANSITIONS: dict[SourceState, dict[SourceEvent, SourceState]] = {
    SourceState.QUEUED: {SourceEvent.COMPUTE_STARTED: SourceState.COMPUTING, **_SOURCE_ENDS},
    SourceState.COMPUTING: {SourceEvent.CHUNK_SEALED: SourceState.SEALED, **_SOURCE_ENDS},
    SourceState.SEALED: {
        SourceEvent.CHUNK_SEALED: SourceState.SEALED,
        SourceEvent.COMPLETED: SourceState.COMPLETE,
        SourceEvent.LEASE_ENDED: SourceState.RELEASED,
        **_SOURCE_ENDS,
    },
    SourceState.COMPLETE: {
        SourceEvent.ALL_TAKEN: SourceState.RELEASED,
        SourceEvent.LEASE_ENDED: SourceState.RELEASED,
        **_SOURCE_ENDS,
    },
    SourceState.RELEASED: {},
}


# -- sink transfer -----------------------------------------------------------------------------------------------------


@unique
class SinkState(Enum):
    OFFERED = "offered"
    CREDITED = "credited"
    FILLING = "filling"
    READY = "ready"
    RUNNING = "running"
    PREEMPTED = "preempted"
    DONE = "done"
    DRAINING = "draining"
    CLOSED = "closed"


@unique
class SinkEvent(Enum):
    CREDIT_GRANTED = "credit_granted"
    REFUSED = "refused"
    FILL_STARTED = "fill_started"
    FILLED = "filled"
    RUN_STARTED = "run_started"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"
    DRAINED = "drained"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    PEER_LOST = "peer_lost"
    DEADLINE_PASSED = "deadline_passed"


SINK_ENDS = (SinkEvent.CANCELLED, SinkEvent.SUPERSEDED, SinkEvent.FAILED, SinkEvent.PEER_LOST, SinkEvent.DEADLINE_PASSED)
_TO_DRAINING = dict.fromkeys(SINK_ENDS, SinkState.DRAINING)

SINK_TRANSITIONS: dict[SinkState, dict[SinkEvent, SinkState]] = {
    SinkState.OFFERED: {SinkEvent.CREDIT_GRANTED: SinkState.CREDITED, SinkEvent.REFUSED: SinkState.CLOSED},
    SinkState.CREDITED: {SinkEvent.FILL_STARTED: SinkState.FILLING, **_TO_DRAINING},
    SinkState.FILLING: {SinkEvent.FILLED: SinkState.READY, **_TO_DRAINING},
    SinkState.READY: {
        SinkEvent.RUN_STARTED: SinkState.RUNNING,
        SinkEvent.PREEMPTED: SinkState.PREEMPTED,
        SinkEvent.FINISHED: SinkState.DONE,
        **_TO_DRAINING,
    },
    SinkState.RUNNING: {SinkEvent.PREEMPTED: SinkState.PREEMPTED, SinkEvent.FINISHED: SinkState.DONE, **_TO_DRAINING},
    SinkState.PREEMPTED: {SinkEvent.RESUMED: SinkState.FILLING, **_TO_DRAINING},
    SinkState.DONE: dict.fromkeys(SINK_ENDS, SinkState.CLOSED),
    SinkState.DRAINING: {SinkEvent.DRAINED: SinkState.CLOSED},
    SinkState.CLOSED: {},
}


# -- block -------------------------------------------------------------------------------------------------------------


@unique
class BlockState(Enum):
    """DRAIN: bytes that were read and will not be committed. COMMITTED with a cache holder only is what users call cached."""

    FREE = "free"
    ALLOCATED = "allocated"
    READING = "reading"
    LANDED = "landed"
    VALID = "valid"
    COMMITTED = "committed"
    DRAIN = "drain"
    QUARANTINED = "quarantined"

    __hash__ = object.__hash__  # as of events: an enum's own is a call of Python, and blocks move in every step


@unique
class BlockEvent(Enum):
    HANDED_OUT = "handed_out"
    READ_POSTED = "read_posted"
    READ_DONE = "read_done"
    READ_ENDED = "read_ended"
    VALIDATED = "validated"
    REFUSED = "refused"
    ALL_COMPONENTS = "all_components"
    COMPUTED = "computed"
    QUARANTINED = "quarantined"
    RELEASED = "released"

    __hash__ = object.__hash__


BLOCK_TRANSITIONS: dict[BlockState, dict[BlockEvent, BlockState]] = {
    BlockState.FREE: {BlockEvent.HANDED_OUT: BlockState.ALLOCATED},
    BlockState.ALLOCATED: {
        BlockEvent.READ_POSTED: BlockState.READING,
        BlockEvent.COMPUTED: BlockState.COMMITTED,
        BlockEvent.RELEASED: BlockState.FREE,
    },
    BlockState.READING: {BlockEvent.READ_DONE: BlockState.LANDED, BlockEvent.READ_ENDED: BlockState.DRAIN},
    BlockState.LANDED: {
        BlockEvent.VALIDATED: BlockState.VALID,
        BlockEvent.REFUSED: BlockState.DRAIN,
        BlockEvent.RELEASED: BlockState.FREE,
    },
    BlockState.VALID: {BlockEvent.ALL_COMPONENTS: BlockState.COMMITTED, BlockEvent.RELEASED: BlockState.FREE},
    BlockState.COMMITTED: {BlockEvent.RELEASED: BlockState.FREE},
    BlockState.DRAIN: {
        BlockEvent.READ_POSTED: BlockState.READING,
        BlockEvent.QUARANTINED: BlockState.QUARANTINED,
        BlockEvent.RELEASED: BlockState.FREE,
    },
    BlockState.QUARANTINED: {BlockEvent.RELEASED: BlockState.FREE},
}


# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Post `message` to `peer`; without a connection it is dropped (the protocol lives with lost messages)."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class PostRead:
    """READ block `remote_ids[i]` of `peer` into own block `local_ids[i]`; answer with read_done or read_failed.

    They are logical block `first_block + i` of their sequence, and `serving_ranks[i]` of the peer serves it; empty is rank 0.
    """

    read_id: int
    peer: PeerId
    local_ids: tuple[BlockId, ...]
    remote_ids: tuple[BlockId, ...]
    first_block: int = 0
    serving_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspectPeer:
    """A READ from `peer` takes long: report the pair as down until a READ or a probe is DONE."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class DestroyAgent:
    """Destroy the agent that serves `peer`, then call agent_destroyed; the pair may be re-made under its next epoch."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RecordArrived:
    """A usable record is here: its token was drawn exactly once and may be shown at once."""

    transfer: TransferId
    record: HandoffRecord


@dataclass(frozen=True, slots=True)
class ShareBlocks:
    """These blocks are committed, and of the ranks that have each only the one that read it has its bytes.

    The others must copy it before any step that is planned from now on reads it; then release EXCHANGE.
    """

    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every block of the prompt is COMMITTED. Without a record (`session.record`) recompute the last token."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class FillLocally:
    """Compute the tokens from `from_token` on yourself; the block table covers them. Then call filled_locally."""

    transfer: TransferId
    from_token: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The transfer has ended here, exactly once for each one started or opened: forget its sequence, touch its blocks no more.

    failure: what the router was told, if this end is a failure.
    """

    transfer: TransferId
    reason: str
    failure: Failed | None = None


Effect = Send | PostRead | SuspectPeer | DestroyAgent | RecordArrived | ShareBlocks | Ready | FillLocally | Dropped


def digest_record(record: HandoffRecord) -> bytes:
    """16 bytes over everything in the record but the digest itself."""
    bare = msgspec.structs.replace(record, digest=b"")
    return hashlib.sha256(msgspec.msgpack.encode(bare)).digest()[:16]


def seal_record(record: HandoffRecord) -> HandoffRecord:
    """The record with its digest filled in, new."""
    return msgspec.structs.replace(record, digest=digest_record(record))


def is_record_usable(record: HandoffRecord, first_index: int) -> bool:
    """Whether decode may go on from the record's token: known schema, whole, and drawn at the index that was asked for."""
    return record.schema == RECORD_SCHEMA and record.digest == digest_record(record) and record.first_index == first_index
