"""All transfers of one worker as a sink: finds the transfer of a message or READ, remembers closed ones, asks no clock.

Every method takes `now_s` (any monotonic clock of the worker) and returns the effects that the worker must carry out, in order.
A method that names a transfer which has ended meanwhile does nothing: the engine may be one step behind the network. Every
transfer that was opened is Dropped exactly once.
"""

import logging
from typing import ClassVar

from kv_transfer.attempt_memory import AttemptMemory
from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import PoolExhausted, TransferError
from kv_transfer.geometry import ONE_RANK, CacheSharding
from kv_transfer.handoff import DestroyAgent, Effect, Send, SinkEvent
from kv_transfer.identity import BlockId, Incarnation, PackedTokens, PeerId, TransferId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import (
    Ask,
    Cancel,
    Closed,
    Complete,
    Failed,
    FailureKind,
    Gone,
    HandoffRecord,
    Keep,
    Message,
    OpenSink,
    Progress,
    Seal,
    SinkBusy,
    Stale,
    Valid,
)
from kv_transfer.sink_handoff import SinkHandoff

logger = logging.getLogger(__name__)


class SinkSession:
    """The transfers that this worker receives and decodes, including those that it fills itself."""

    handoff_type: ClassVar[type[SinkHandoff]] = SinkHandoff

    def __init__(
        self,
        pool: BlockPool,
        incarnation: Incarnation,
        timers: ProtocolTimers,
        layout: CacheLayout,
        destroying_proven: bool,
        *,
        hidden_state_bytes: int | None = None,
        sharding: CacheSharding = ONE_RANK,
    ) -> None:
        """hidden_state_bytes: of a record's hidden state, if it has one; None takes any. sharding: how the pool's blocks lie on ranks."""
        self._pool = pool
        self._incarnation = incarnation
        self._timers = timers
        self._layout = layout
        self._destroying_proven = destroying_proven
        self._hidden_state_bytes = hidden_state_bytes
        self._sharding = sharding
        self._transfers: dict[TransferId, SinkHandoff] = {}
        self._reads: dict[int, TransferId] = {}
        self._next_read_id = 1
        self._next_keep_s = 0.0
        self._destroying: set[PeerId] = set()
        self._attempts = AttemptMemory()

    # -- what the worker does ------------------------------------------------------------------------------------------

    def open(self, message: OpenSink, router: PeerId, source: PeerId | None, now_s: float, busy_s: float | None = None) -> list[Effect]:
        """Take OPEN_SINK: pin the prefix that is here, reserve the credit, answer SINK_READY; or SINK_BUSY.

        busy_s: refuse with this retry-after. A duplicate gets the same answer; after CANCEL it is GONE; a larger attempt drains
        the smaller one. Without a source the blocks are allocated at once and FillLocally says where to begin.
        """
        transfer = message.transfer
        known = self._live(transfer)
        if known is not None:
            return [known.say_ready()]
        if not self.may_open(transfer):
            return [Send(router, Gone(transfer, "open"))]
        effects: list[Effect] = []
        for older in [other for other in self._transfers.values() if other.is_live and other.transfer.request_id == transfer.request_id]:
            effects += self._settle(older, older.end(self._pool, SinkEvent.SUPERSEDED, "superseded"))
        if busy_s is not None:
            return [*effects, Send(router, SinkBusy(transfer, busy_s))]
        handoff = self.handoff_type(message, router, source, self._timers, self._layout, now_s, self._hidden_state_bytes, self._sharding)
        try:
            effects += handoff.open(self._pool)
        except PoolExhausted as error:
            logger.info("no credit request_id=%s error=%s", transfer.request_id, error)
            return [*effects, Send(router, SinkBusy(transfer, self._timers.repeat_s))]
        self._transfers[transfer] = handoff
        self._attempts.note(transfer, handoff.deadline_s)
        return effects

    def may_open(self, transfer: TransferId) -> bool:
        """Whether OPEN_SINK of a transfer that is not live may begin it: it was never here, nor was a larger attempt."""
        return transfer.sink_incarnation == self._incarnation and not self._attempts.has_seen(transfer)

    def block_table(self, transfer: TransferId) -> tuple[BlockId, ...]:
        """Blocks of the sequence in order, pinned prefix first; as many as are allocated so far. Empty when the transfer has ended."""
        handoff = self._live(transfer)
        return handoff.space.table if handoff is not None else ()

    def have_tokens(self, transfer: TransferId) -> int:
        """Tokens at the start of the sequence that need not be sent or computed. Raises KeyError for an unknown transfer."""
        return self._transfers[transfer].have_tokens

    def record(self, transfer: TransferId) -> HandoffRecord | None:
        """The usable hand-off record, if there is one. Raises KeyError for an unknown transfer."""
        return self._transfers[transfer].record

    def grow(self, transfer: TransferId, num_blocks: int) -> tuple[BlockId, ...]:
        """Append blocks for output tokens, from the credit first; those. Raises PoolExhausted: preempt the youngest request."""
        handoff = self._live(transfer)
        return handoff.space.grow(self._pool, num_blocks) if handoff is not None else ()

    def credit_blocks(self, transfer: TransferId) -> int:
        """Blocks that are promised to this transfer and not allocated yet; 0 when it has ended."""
        handoff = self._live(transfer)
        return handoff.space.credit_blocks if handoff is not None else 0

    def fail(self, transfer: TransferId, kind: FailureKind, code: str, message: str, now_s: float) -> list[Effect]:
        """The worker cannot go on: FAILED to the router, everything released but READs in flight."""
        del now_s
        handoff = self._live(transfer)
        return self._settle(handoff, handoff.fail(self._pool, kind, code, message)) if handoff is not None else []

    def filled_locally(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """What FillLocally asked for is computed: the transfer is READY (no Ready effect)."""
        del now_s
        handoff = self._live(transfer)
        return handoff.filled_locally() if handoff is not None else []

    def running(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The scheduler has put the sequence into its running batch."""
        del now_s
        handoff = self._live(transfer)
        return handoff.running() if handoff is not None else []

    def finished(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The last token is sampled. The blocks go back (those published stay cached); the worker keeps the tokens until Dropped."""
        del now_s
        handoff = self._live(transfer)
        return handoff.finished(self._pool) if handoff is not None else []

    def preempted(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The sequence gives its blocks up; steps in flight keep their own holders."""
        del now_s
        handoff = self._live(transfer)
        return handoff.preempted(self._pool) if handoff is not None else []

    def resume(self, transfer: TransferId, tokens: PackedTokens, now_s: float) -> list[Effect]:
        """Fill a preempted sequence again with `tokens` (prompt and output so far): FillLocally. Raises PoolExhausted."""
        del now_s
        handoff = self._live(transfer)
        return handoff.resume(self._pool, tokens) if handoff is not None else []

    def is_live(self, transfer: TransferId) -> bool:
        """Whether the transfer is known and neither draining nor closed."""
        return self._live(transfer) is not None

    @property
    def num_live(self) -> int:
        """Transfers that are neither draining nor closed."""
        return sum(handoff.is_live for handoff in self._transfers.values())

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are promised as credit and not allocated yet."""
        return self._pool.num_promised

    def audit(self) -> None:
        """Recount. Raises AssertionError when the pool's promises are not the credit of the transfers, or are not covered."""
        credit = sum(handoff.space.credit_blocks for handoff in self._transfers.values())
        assert credit == self._pool.num_promised, f"{self._pool.num_promised} blocks are promised and the credit is {credit}"
        unpromised = self._pool.unpromised_by_home()
        assert min(unpromised) >= 0, (
            f"{credit} blocks are promised and {self._pool.num_available} could be had, by home {unpromised} too few"
        )
        reads = {read_id for handoff in self._transfers.values() for read_id in handoff.reads_in_flight}
        assert reads == set(self._reads), "READs in flight and their transfers disagree"

    # -- what others say -----------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: Message, now_s: float) -> list[Effect]:
        """Any message of a hand-off but OPEN_SINK; one that is not for a sink is ignored. ASK is only answered when GONE."""
        if not isinstance(message, Seal | Complete | Progress | Valid | Stale | Gone | Failed | Cancel | Closed | Ask):
            return []
        handoff = self._live(message.transfer)
        if handoff is None:
            return self._receive_unknown(peer, message, now_s)
        if isinstance(message, Seal):
            return self._settle(handoff, self._receive_seal(handoff, message, now_s))
        if isinstance(message, Gone | Failed | Cancel | Closed):
            return self._settle(handoff, self._receive_end(handoff, peer, message, now_s))
        if isinstance(message, Complete):
            effects = handoff.receive_complete(self._pool, message, now_s)
        elif isinstance(message, Progress):
            effects = handoff.receive_progress(self._pool, message, now_s)
        elif isinstance(message, Valid):
            effects = handoff.receive_valid(self._pool, message.chunk, message.read_number)
        elif isinstance(message, Stale):
            effects = handoff.receive_stale(self._pool, message.chunk, message.read_number, now_s)
        else:
            effects = []
        return self._settle(handoff, effects)

    def _receive_seal(self, handoff: SinkHandoff, message: Seal, now_s: float) -> list[Effect]:
        if handoff.source in self._destroying and handoff.is_filling:
            return handoff.fail(self._pool, FailureKind.RETRYABLE_ELSEWHERE, "pair_down", "the agent of this pair is being re-made")
        read_id = self._next_read_id
        effects = handoff.receive_seal(self._pool, message, read_id, now_s)
        if read_id in handoff.reads_in_flight:
            self._reads[read_id] = handoff.transfer
            self._next_read_id += 1
        return effects

    def _receive_end(self, handoff: SinkHandoff, peer: PeerId, message: Gone | Failed | Cancel | Closed, now_s: float) -> list[Effect]:
        """Somebody leaves. The router's word ends the transfer; the source's only while something is still needed from it."""
        if isinstance(message, Gone) and message.about == "validate":
            return handoff.receive_stale(self._pool, message.chunk, message.read_number, now_s)
        if peer == handoff.router:
            reason = message.reason if isinstance(message, Cancel | Closed) else type(message).__name__.lower()
            return handoff.end(self._pool, SinkEvent.CANCELLED, reason)
        if not self.heeds_source_end(handoff):
            return []
        if isinstance(message, Failed):
            return handoff.fail(self._pool, message.kind, message.code, message.message)
        return handoff.fail(self._pool, FailureKind.RETRYABLE_ELSEWHERE, "source_gone", "the source does not know the transfer any more")

    def heeds_source_end(self, handoff: SinkHandoff) -> bool:
        """GONE, FAILED and the like are ignored once nothing more is needed from the source."""
        return handoff.needs_source

    def _receive_unknown(
        self, peer: PeerId, message: Seal | Complete | Progress | Valid | Stale | Gone | Failed | Cancel | Closed | Ask, now_s: float
    ) -> list[Effect]:
        transfer = message.transfer
        if isinstance(message, Cancel) and transfer in self._transfers:
            return []  # draining: CLOSED will answer
        if isinstance(message, Cancel) and self.may_open(transfer):
            self._attempts.note(transfer, now_s + self._timers.closed_memory_s)
        if isinstance(message, Seal | Complete | Progress | Cancel | Ask):
            return [Send(peer, Gone(transfer, type(message).__name__.lower()))]
        return []

    def peer_lost(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The peer's process or connection is gone. A router's death cancels what it opened; a source's fails what needs it."""
        del now_s
        effects: list[Effect] = []
        for handoff in [handoff for handoff in self._transfers.values() if handoff.is_live]:
            if peer == handoff.router:
                effects += self._settle(handoff, handoff.end(self._pool, SinkEvent.PEER_LOST, "router_lost"))
            elif peer == handoff.source and self.heeds_source_end(handoff):
                failed = handoff.fail(self._pool, FailureKind.RETRYABLE_ELSEWHERE, "source_lost", f"{peer} is gone", SinkEvent.PEER_LOST)
                effects += self._settle(handoff, failed)
        if any(self._transfers[transfer].source == peer for transfer in self._reads.values()):
            effects += self._destroy(peer)
        return effects

    # -- READs ---------------------------------------------------------------------------------------------------------

    def read_done(self, read_id: int, now_s: float) -> list[Effect]:
        """Every byte of the READ has landed."""
        transfer = self._reads.pop(read_id, None)
        if transfer is None:
            return []
        handoff = self._transfers[transfer]
        return self._settle(handoff, handoff.read_done(self._pool, read_id, now_s))

    def read_failed(self, read_id: int, error: TransferError, now_s: float) -> list[Effect]:
        """The READ raised, which is not DONE: the peer's agent must be destroyed before the blocks can go back."""
        del now_s
        transfer = self._reads.get(read_id)
        if transfer is None:
            return []
        source = self._transfers[transfer].source
        assert source is not None, "a READ has a source"
        logger.warning("read failed peer=%s request_id=%s code=%s error=%s", source, transfer.request_id, error.code, error)
        return self._destroy(source)

    def agent_destroyed(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The agent that served `peer` is gone, and with it every READ from that peer that had not ended."""
        del now_s
        self._destroying.discard(peer)
        quarantine = None if self._destroying_proven else Holder(HolderKind.QUARANTINE, peer)
        effects = self._fail_readers(peer)
        for read_id, transfer in list(self._reads.items()):
            handoff = self._transfers[transfer]
            if handoff.source == peer:
                del self._reads[read_id]
                effects += self._settle(handoff, handoff.end_read(self._pool, read_id, quarantine))
        return effects

    def _destroy(self, peer: PeerId) -> list[Effect]:
        if peer in self._destroying:
            return []
        self._destroying.add(peer)
        return [DestroyAgent(peer), *self._fail_readers(peer)]

    def _fail_readers(self, peer: PeerId) -> list[Effect]:
        """Transfers whose READ will not end by itself cannot go on; what they have committed stays."""
        effects: list[Effect] = []
        for handoff in [handoff for handoff in self._transfers.values() if handoff.is_live and handoff.source == peer]:
            if handoff.reads_in_flight:
                failed = handoff.fail(self._pool, FailureKind.RETRYABLE_ELSEWHERE, "read_failed", f"a READ from {peer} did not end")
                effects += self._settle(handoff, failed)
        return effects

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Look at the timers; call about every 100 ms."""
        effects: list[Effect] = []
        for handoff in list(self._transfers.values()):
            if handoff.source is not None and handoff.has_overdue_read(now_s):
                effects += self._destroy(handoff.source)
            if handoff.transfer in self._transfers:
                effects += self._settle(handoff, handoff.tick(self._pool, now_s))
        if now_s >= self._next_keep_s:
            self._next_keep_s = now_s + self._timers.keep_interval_s
            effects += self.keep()
        self._attempts.forget_until(now_s)
        return effects

    def keep(self) -> list[Effect]:
        """Renew the leases, one message per source."""
        kept: dict[PeerId, list[TransferId]] = {}
        for handoff in self._transfers.values():
            if handoff.source is not None and self.is_kept(handoff):
                kept.setdefault(handoff.source, []).append(handoff.transfer)
        return [Send(source, Keep(tuple(transfers))) for source, transfers in kept.items()]

    def is_kept(self, handoff: SinkHandoff) -> bool:
        """KEEP is for what the source has spoken of: an early one would draw GONE and end what is about to start."""
        return handoff.is_heard and handoff.needs_source

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _live(self, transfer: TransferId) -> SinkHandoff | None:
        handoff = self._transfers.get(transfer)
        return handoff if handoff is not None and handoff.is_live else None

    def _settle(self, handoff: SinkHandoff, effects: list[Effect]) -> list[Effect]:
        """After anything that may have closed the transfer."""
        if handoff.is_closed:
            self._transfers.pop(handoff.transfer, None)
        return effects
