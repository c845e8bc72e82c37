"""All transfers of one worker as a source: finds the transfer of a message, remembers closed ones, asks no clock.

Every method takes `now_s` (any monotonic clock of the worker) and returns the effects that the worker must carry out, in order.
A method that names a transfer which has ended meanwhile does nothing: the engine may be one step behind the network. Every
transfer that was started is Dropped exactly once.
"""

from typing import ClassVar

from kv_transfer.attempt_memory import AttemptMemory
from kv_transfer.block_pool import BlockPool
from kv_transfer.config import ProtocolTimers
from kv_transfer.geometry import ONE_RANK, CacheSharding
from kv_transfer.handoff import Effect, Send, SourceEvent
from kv_transfer.identity import BlockId, Incarnation, PeerId, TransferId
from kv_transfer.messages import (
    Cancel,
    Closed,
    Failed,
    FailureKind,
    Gone,
    HandoffRecord,
    Keep,
    Message,
    Resend,
    Stale,
    StartSource,
    Taken,
    Valid,
    Validate,
)
from kv_transfer.source_handoff import SourceHandoff, answer_validate


class SourceSession:
    """The transfers that this worker computes and sends."""

    handoff_type: ClassVar[type[SourceHandoff]] = SourceHandoff

    def __init__(
        self, pool: BlockPool, incarnation: Incarnation, timers: ProtocolTimers, component_mask: int, sharding: CacheSharding = ONE_RANK
    ) -> None:
        """sharding: how the pool's blocks lie on this worker's ranks."""
        self._pool = pool
        self._incarnation = incarnation
        self._timers = timers
        self._component_mask = component_mask
        self._sharding = sharding
        self._live: dict[TransferId, SourceHandoff] = {}
        self._lapsed: dict[TransferId, float] = {}
        self._attempts = AttemptMemory()

    # -- what the worker does ------------------------------------------------------------------------------------------

    def start(self, message: StartSource, router: PeerId, sink: PeerId, now_s: float) -> tuple[bool, list[Effect]]:
        """Take START_SOURCE. Returns (whether the worker must queue a new sequence, effects).

        A duplicate returns False and says PROGRESS again; after any release, or for another incarnation, it is answered GONE.
        A larger attempt of the same request first holds what the smaller one has sealed, then the smaller one is Dropped.
        """
        transfer = message.transfer
        known = self._live.get(transfer)
        if known is not None:
            return False, known.say_progress(now_s)
        if not self.may_start(transfer):
            return False, [Send(router, Gone(transfer, "start"))]
        handoff = self.handoff_type(message, router, sink, self._timers, self._component_mask, now_s, self._sharding)
        effects: list[Effect] = []
        for older in [other for other in self._live.values() if other.transfer.request_id == transfer.request_id]:
            handoff.inherit(self._pool, older)
            effects += self._settle(older, older.end(self._pool, SourceEvent.SUPERSEDED, "superseded"))
        self._live[transfer] = handoff
        self._attempts.note(transfer, handoff.deadline_s)
        return True, [*effects, *handoff.say_progress(now_s)]

    def may_start(self, transfer: TransferId) -> bool:
        """Whether START_SOURCE of a transfer that is not live may begin it: it was never here, nor was a larger attempt."""
        return transfer.source_incarnation == self._incarnation and not self._attempts.has_seen(transfer)

    def computing(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The scheduler has taken the sequence out of its queue. The worker holds the blocks under Holder(COMPUTE, transfer)."""
        del now_s
        handoff = self._live.get(transfer)
        return handoff.computing(self._pool) if handoff is not None else []

    def progress(self, transfer: TransferId, num_computed_tokens: int, queue_position: int) -> None:
        """What the next PROGRESS says."""
        handoff = self._live.get(transfer)
        if handoff is not None:
            handoff.progress(num_computed_tokens, queue_position)

    def seal(self, transfer: TransferId, start: int, end: int, block_ids: tuple[BlockId, ...], now_s: float) -> list[Effect]:
        """The cache of tokens [start, end) is stored in `block_ids` and is final. Call after the chunk's last store.

        `start` is a multiple of the block size; `end` too, except for the prompt's last chunk. Tokens before `need_from` are not
        announced, so cached blocks may be sealed together with the first computed chunk.
        """
        handoff = self._live.get(transfer)
        return handoff.seal(self._pool, start, end, block_ids, now_s) if handoff is not None else []

    def complete(self, transfer: TransferId, record: HandoffRecord, now_s: float) -> list[Effect]:
        """The last chunk is sealed and token `first_index` drawn. Releases COMPUTE on every block; the digest is filled in here."""
        del now_s
        handoff = self._live.get(transfer)
        return self._settle(handoff, handoff.complete(self._pool, record)) if handoff is not None else []

    def fail(self, transfer: TransferId, kind: FailureKind, code: str, message: str, now_s: float) -> list[Effect]:
        """The worker cannot go on: FAILED to router and sink, everything released."""
        del now_s
        handoff = self._live.get(transfer)
        return self._settle(handoff, handoff.fail(self._pool, SourceEvent.FAILED, kind, code, message)) if handoff is not None else []

    def is_live(self, transfer: TransferId) -> bool:
        """Whether the transfer is known and not released."""
        return transfer in self._live

    @property
    def num_live(self) -> int:
        """Transfers that are not released."""
        return len(self._live)

    @property
    def live_transfers(self) -> tuple[TransferId, ...]:
        """Those transfers, oldest first."""
        return tuple(self._live)

    # -- what others say -----------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: Message, now_s: float) -> list[Effect]:
        """Any message of a hand-off but START_SOURCE; one that is not for a source is ignored."""
        if isinstance(message, Keep):
            return [effect for transfer in message.transfers for effect in self._keep(peer, transfer, now_s)]
        if isinstance(message, Validate):
            return [Send(peer, self._answer_validate(message, now_s))]
        if not isinstance(message, Resend | Taken | Cancel | Closed | Gone | Failed):
            return []
        handoff = self._live.get(message.transfer)
        if handoff is None:
            return self._receive_unknown(peer, message, now_s)
        if isinstance(message, Resend):
            return handoff.receive_resend(message, now_s)
        if isinstance(message, Taken):
            return self._settle(handoff, handoff.receive_taken(self._pool, message, now_s))
        reason = message.reason if isinstance(message, Cancel | Closed) else type(message).__name__.lower()
        answer: list[Effect] = [Send(peer, Closed(message.transfer, reason))] if isinstance(message, Cancel) else []
        return [*self._settle(handoff, handoff.end(self._pool, SourceEvent.CANCELLED, reason)), *answer]

    def peer_lost(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The peer's process or connection is gone: whatever it opened here, or was sent to it, ends."""
        del now_s
        effects: list[Effect] = []
        for handoff in [handoff for handoff in self._live.values() if peer in (handoff.router, handoff.sink)]:
            code = "router_lost" if peer == handoff.router else "sink_lost"
            ended = handoff.fail(self._pool, SourceEvent.PEER_LOST, FailureKind.RETRYABLE_ELSEWHERE, code, f"{peer} is gone")
            effects += self._settle(handoff, ended)
        return effects

    def tick(self, now_s: float) -> list[Effect]:
        """Look at the timers; call about every 100 ms."""
        effects: list[Effect] = []
        for handoff in list(self._live.values()):
            effects += self._settle(handoff, handoff.tick(self._pool, now_s))
        self._attempts.forget_until(now_s)
        for transfer in [transfer for transfer, until_s in self._lapsed.items() if until_s <= now_s]:
            del self._lapsed[transfer]
        return effects

    def _keep(self, peer: PeerId, transfer: TransferId, now_s: float) -> list[Effect]:
        handoff = self._live.get(transfer)
        if handoff is None:
            return [] if transfer in self._lapsed else [Send(peer, Gone(transfer, "keep"))]
        handoff.renew(now_s)
        return []

    def _answer_validate(self, message: Validate, now_s: float) -> Valid | Stale | Gone:
        handoff = self._live.get(message.transfer)
        if handoff is not None:
            handoff.renew(now_s)
        elif message.transfer not in self._lapsed:
            return Gone(message.transfer, "validate", message.chunk, message.read_number)
        return answer_validate(self._pool, message)

    def _receive_unknown(self, peer: PeerId, message: Resend | Taken | Cancel | Closed | Gone | Failed, now_s: float) -> list[Effect]:
        transfer = message.transfer
        if isinstance(message, Cancel) and self.may_start(transfer):
            self._attempts.note(transfer, now_s + self._timers.closed_memory_s)
        if isinstance(message, Resend | Taken | Cancel):
            return [Send(peer, Gone(transfer, type(message).__name__.lower()))]
        return []

    def _settle(self, handoff: SourceHandoff, effects: list[Effect]) -> list[Effect]:
        """After anything that may have ended the transfer."""
        if not handoff.is_live:
            self._live.pop(handoff.transfer, None)
            if handoff.is_lapsed:
                self._lapsed[handoff.transfer] = handoff.deadline_s
        return effects
