"""One transfer as its sink sees it: what is announced, read, validated and committed. Without I/O and without a clock.

Knows: PROTOCOL's rules for one sink, whose ranks it sees as one. Does not know other transfers (`sink_session.py`). A chunk has no state
of its own: its blocks have one, all the same (`handoff.BLOCK_TRANSITIONS`, kept by the pool). Methods that are one rule of the protocol
are methods of their own, so that a test can take the rule away and watch an invariant break.
"""

import logging
from dataclasses import dataclass

from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import EXCHANGE, BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import PoolExhausted
from kv_transfer.geometry import ONE_RANK, CacheSharding
from kv_transfer.handoff import (
    SINK_TRANSITIONS,
    BlockEvent,
    BlockState,
    Dropped,
    Effect,
    FillLocally,
    PostRead,
    Ready,
    RecordArrived,
    Send,
    ShareBlocks,
    SinkEvent,
    SinkState,
    SourceState,
    SuspectPeer,
    advance,
    is_record_usable,
)
from kv_transfer.identity import BlockId, PackedTokens, PeerId, count_tokens
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import (
    Cancel,
    Closed,
    Complete,
    Failed,
    FailureKind,
    HandoffRecord,
    OpenSink,
    Progress,
    Resend,
    Seal,
    SealedBlock,
    SinkReady,
    Taken,
    Validate,
)
from kv_transfer.sink_space import SinkSpace

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SinkChunk:
    """Tokens [start, end): the source's blocks as last announced, ours, and the READ numbered `read_number` between them."""

    start: int
    end: int
    source_blocks: tuple[SealedBlock, ...]
    local_ids: tuple[BlockId, ...]
    read_number: int = 0
    read_id: int | None = None
    posted_s: float = 0.0
    is_suspect: bool = False
    asked_s: float = 0.0


class SinkHandoff:
    """The sink's side of one attempt, from OPEN_SINK to CLOSED."""

    def __init__(
        self,
        message: OpenSink,
        router: PeerId,
        source: PeerId | None,
        timers: ProtocolTimers,
        layout: CacheLayout,
        now_s: float,
        hidden_state_bytes: int | None = None,
        sharding: CacheSharding = ONE_RANK,
    ) -> None:
        self.transfer = message.transfer
        self.router = router
        self.source = source
        self.is_local = source is None
        self.state = SinkState.OFFERED
        self.first_index = message.first_index
        self.deadline_s = now_s + message.deadline_s
        self.space = SinkSpace(message.transfer)
        self.chunks: dict[int, SinkChunk] = {}
        self.committed: set[int] = set()
        self.num_chunks: int | None = None
        self.record: HandoffRecord | None = None
        self.has_record_answer = False
        self.is_heard = False
        self.heard_s = now_s
        self.reason = ""
        self._salt = message.cache_salt
        # Earlier attempts have emitted some of the output already, and the cache of its last token is never stored.
        num_stored_output_tokens = max(message.sampling.max_tokens - message.first_index - 1, 0)
        self._max_output_tokens = min(num_stored_output_tokens, timers.credit_output_tokens)
        self._timers = timers
        self._layout = layout
        self._hidden_state_bytes = hidden_state_bytes
        self._sharding = sharding
        self._set_tokens(message.tokens)

    def _set_tokens(self, tokens: PackedTokens) -> None:
        self.num_tokens = count_tokens(tokens)
        self._keys = block_keys(tokens, self._salt, self._layout.block_size_tokens, self._layout.looks_one_token_ahead)

    @property
    def is_live(self) -> bool:
        """Whether the worker still has something to do for it."""
        state = self.state
        return state is not SinkState.DRAINING and state is not SinkState.CLOSED

    @property
    def is_closed(self) -> bool:
        """Whether nothing is held here any more."""
        return self.state is SinkState.CLOSED

    @property
    def is_filling(self) -> bool:
        """Whether the source's SEALs are for us."""
        return not self.is_local and self.state in (SinkState.CREDITED, SinkState.FILLING)

    @property
    def has_everything(self) -> bool:
        """Whether every chunk is committed and the record's answer is in hand: nothing more is needed from the source."""
        return self.has_record_answer and self.num_chunks is not None and len(self.committed) == self.num_chunks

    @property
    def needs_source(self) -> bool:
        """Whether something is still to come from the source; GONE and silence matter only then."""
        return self.is_filling and not self.has_everything

    @property
    def have_tokens(self) -> int:
        """Tokens of the prefix that was pinned here."""
        return self.space.have_blocks * self._layout.block_size_tokens

    # -- opening -------------------------------------------------------------------------------------------------------

    def open(self, pool: BlockPool) -> list[Effect]:
        """Pin the prefix that is here and reserve the credit. Raises PoolExhausted, holding nothing."""
        try:
            self._open_space(pool, self._max_output_tokens)
        except PoolExhausted:
            self._advance(SinkEvent.REFUSED)
            raise
        self._advance(SinkEvent.CREDIT_GRANTED)
        if not self.is_local:
            return [self.say_ready()]
        self._advance(SinkEvent.FILL_STARTED)
        return [self.say_ready(), self._fill_locally(pool)]

    def say_ready(self) -> Send:
        """The answer to OPEN_SINK, the same each time."""
        return Send(self.router, SinkReady(self.transfer, self.have_tokens, self.space.granted_blocks))

    def _open_space(self, pool: BlockPool, num_output_tokens: int) -> None:
        # Whoever computes must compute the last token at least, so the pinned prefix never reaches it.
        keys = self._keys[: (self.num_tokens - 1) // self._layout.block_size_tokens]
        self.space.open(pool, keys, self._num_blocks(self.num_tokens + num_output_tokens))

    def _fill_locally(self, pool: BlockPool) -> Effect:
        self.space.allocate(pool, range(self.space.have_blocks, self._num_blocks(self.num_tokens)))
        return FillLocally(self.transfer, self.have_tokens)

    # -- what the source says ------------------------------------------------------------------------------------------

    def hear(self, now_s: float) -> None:
        """The source speaks: it lives and knows the transfer."""
        self.is_heard = True
        self.heard_s = now_s
        if self.state is SinkState.CREDITED:
            self._advance(SinkEvent.FILL_STARTED)

    def receive_seal(self, pool: BlockPool, message: Seal, read_id: int, now_s: float) -> list[Effect]:
        """READ what is announced, unless this chunk is on its way or here. After a RESEND it may name other blocks."""
        if not self.is_filling:
            return []
        self.hear(now_s)
        if not self._fits(message):
            return self.fail(pool, FailureKind.FATAL, "protocol_mismatch", f"chunk {message.chunk} does not fit the sequence")
        chunk = self.chunks.get(message.chunk)
        if chunk is None:
            places = range(message.start // self._layout.block_size_tokens, self._num_blocks(message.end))
            chunk = SinkChunk(message.start, message.end, message.blocks, self.space.allocate(pool, places))
            self.chunks[message.chunk] = chunk
        elif not self.is_wanted_again(pool, chunk):
            return []
        if chunk.read_number == self._timers.max_reads_per_chunk:
            text = f"chunk {message.chunk} was stale {chunk.read_number} times"
            return self.fail(pool, FailureKind.RETRYABLE_ELSEWHERE, "stale", text)
        chunk.source_blocks = message.blocks
        return [self._post_read(pool, chunk, read_id, now_s)]

    def receive_complete(self, pool: BlockPool, message: Complete, now_s: float) -> list[Effect]:
        """Take the record once. One that cannot be used is an answer too: decode recomputes the last token."""
        if not self.is_filling or self.has_record_answer:
            return []
        self.hear(now_s)
        self.num_chunks = message.num_chunks
        self.has_record_answer = True
        effects: list[Effect] = []
        if self.accepts_record(message.record):
            self.record = message.record
            effects.append(RecordArrived(self.transfer, message.record))
        else:
            logger.warning("record unusable request_id=%s attempt=%d", self.transfer.request_id, self.transfer.attempt)
        return [*effects, self._say_taken(), *self._ready_if_whole(pool)]

    def receive_progress(self, pool: BlockPool, message: Progress, now_s: float) -> list[Effect]:
        """Refresh the no-progress timer, and ask for what the source has said and we have not heard."""
        if not self.needs_source:
            return [self._say_taken()] if self.has_everything else []
        self.hear(now_s)
        lost = {number for number in range(message.num_sealed_chunks) if number not in self.chunks}
        stale = {number for number in self.chunks if self._state(pool, number) is BlockState.DRAIN}
        wants_record = message.state == SourceState.COMPLETE.value and not self.has_record_answer
        for number in stale:
            self.chunks[number].asked_s = now_s
        if not lost and not stale and not wants_record:
            return []
        return [self._to_source(Resend(self.transfer, tuple(sorted(lost | stale)), wants_record))]

    def receive_valid(self, pool: BlockPool, number: int, read_number: int) -> list[Effect]:
        """What was read is what was sealed: the blocks commit, whole, and are published."""
        if not self.is_answer(pool, number, read_number):
            return []
        self.commit(pool, number)
        return [*self._share(number), self._say_taken(), *self._ready_if_whole(pool)]

    def receive_stale(self, pool: BlockPool, number: int, read_number: int, now_s: float) -> list[Effect]:
        """What was read is worthless. Ask for that chunk again, and it alone."""
        if not self.is_answer(pool, number, read_number):
            return []
        pool.advance(self.chunks[number].local_ids, BlockEvent.REFUSED)
        return self.ask_again(pool, number, now_s)

    def accepts_record(self, record: HandoffRecord) -> bool:
        """Whether decode may go on from this record: with MTP components their keys must be stored up to the last token.

        A hidden state of another length was computed in another dtype; the cache format, on which both agree, does not tell that.
        """
        has_mtp_keys = not self._layout.looks_one_token_ahead or record.num_mtp_tokens == self.num_tokens
        given = record.hidden_state
        fits = given is None or self._hidden_state_bytes is None or len(given) == self._hidden_state_bytes
        return has_mtp_keys and fits and is_record_usable(record, self.first_index)

    def is_answer(self, pool: BlockPool, number: int, read_number: int) -> bool:
        """Whether an answer about this READ of this chunk is one that we wait for."""
        chunk = self.chunks.get(number)
        if chunk is None or self.state is not SinkState.FILLING or chunk.read_number != read_number:
            return False
        return self._state(pool, number) is BlockState.LANDED

    def is_wanted_again(self, pool: BlockPool, chunk: SinkChunk) -> bool:
        """Whether a SEAL of a chunk that we know is the answer to a RESEND rather than a duplicate."""
        return pool.state(chunk.local_ids[0]) is BlockState.DRAIN

    # -- READs ---------------------------------------------------------------------------------------------------------

    @property
    def reads_in_flight(self) -> tuple[int, ...]:
        """READs that may still write our blocks."""
        return tuple(chunk.read_id for chunk in self.chunks.values() if chunk.read_id is not None)

    def read_done(self, pool: BlockPool, read_id: int, now_s: float) -> list[Effect]:
        """All bytes have landed; only now may the source be asked whether they are the right ones."""
        number = self._number_of(read_id)
        chunk = self.chunks[number]
        if self.state is not SinkState.FILLING:
            return self.end_read(pool, read_id, None)
        chunk.read_id = None
        pool.advance(chunk.local_ids, BlockEvent.READ_DONE)
        pool.release(chunk.local_ids, Holder(HolderKind.HANDLE, read_id))
        return self.landed(pool, number, now_s)

    def landed(self, pool: BlockPool, number: int, now_s: float) -> list[Effect]:
        """Ask the source whether the blocks read are still those that it sealed."""
        return self.ask_again(pool, number, now_s)

    def end_read(self, pool: BlockPool, read_id: int, quarantine: Holder | None) -> list[Effect]:
        """The READ will write no more and nobody wants its bytes: it is DONE in DRAINING, or its agent is destroyed.

        quarantine: a holder for the blocks where destroying the agent may not have stopped the bytes.
        """
        chunk = self.chunks[self._number_of(read_id)]
        chunk.read_id = None
        pool.advance(chunk.local_ids, BlockEvent.READ_ENDED)
        if quarantine is not None:
            pool.hold(chunk.local_ids, quarantine)
            pool.advance(chunk.local_ids, BlockEvent.QUARANTINED)
        pool.release(chunk.local_ids, Holder(HolderKind.HANDLE, read_id))
        return self.close_if_drained()

    def has_overdue_read(self, now_s: float) -> bool:
        """Whether a READ is in flight so long that only destroying the peer's agent will end it."""
        due_s = now_s - self._timers.read_destroy_s
        return any(chunk.read_id is not None and chunk.posted_s <= due_s for chunk in self.chunks.values())

    def _post_read(self, pool: BlockPool, chunk: SinkChunk, read_id: int, now_s: float) -> Effect:
        assert self.source is not None, "there is nobody to READ from"
        chunk.read_number += 1
        chunk.read_id = read_id
        chunk.posted_s = now_s
        chunk.is_suspect = False
        pool.hold(chunk.local_ids, Holder(HolderKind.HANDLE, read_id))
        pool.advance(chunk.local_ids, BlockEvent.READ_POSTED)
        return PostRead(
            read_id,
            self.source,
            chunk.local_ids,
            tuple(block.block_id for block in chunk.source_blocks),
            chunk.start // self._layout.block_size_tokens,
            tuple(block.rank for block in chunk.source_blocks),
        )

    def _number_of(self, read_id: int) -> int:
        return next(number for number, chunk in self.chunks.items() if chunk.read_id == read_id)

    # -- what the worker does ------------------------------------------------------------------------------------------

    def filled_locally(self) -> list[Effect]:
        """The worker has computed what was missing."""
        assert self.is_local, "only a transfer that asked for it is filled locally"
        self._advance(SinkEvent.FILLED)
        return []

    def running(self) -> list[Effect]:
        """The sequence is in the running batch."""
        self._advance(SinkEvent.RUN_STARTED)
        return []

    def finished(self, pool: BlockPool) -> list[Effect]:
        """The last token is sampled: the blocks go back now, the tokens stay with the worker until the router has them."""
        self._advance(SinkEvent.FINISHED)
        self.space.let_go(pool)
        return []

    def preempted(self, pool: BlockPool) -> list[Effect]:
        """Give the blocks up and lose the place in the batch, not the request."""
        self._advance(SinkEvent.PREEMPTED)
        self.space.let_go(pool)
        self.chunks.clear()
        return []

    def resume(self, pool: BlockPool, tokens: PackedTokens) -> list[Effect]:
        """Fill again by computing. Raises PoolExhausted, holding nothing."""
        self._set_tokens(tokens)
        self._open_space(pool, 0)
        self._advance(SinkEvent.RESUMED)
        self.is_local = True
        return [self._fill_locally(pool)]

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def end(self, pool: BlockPool, event: SinkEvent, reason: str, failure: Failed | None = None) -> list[Effect]:
        """Leave: everything but READs in flight lets go at once; CLOSED follows the last of those."""
        effects: list[Effect] = []
        if failure is not None:
            effects.append(Send(self.router, failure))
        if self.needs_source:
            effects.append(self._to_source(Cancel(self.transfer, reason)))
        self.reason = reason
        self._advance(event)
        self.space.let_go(pool)
        effects.append(Dropped(self.transfer, reason, failure))
        return [*effects, *([self.say_closed()] if self.state is SinkState.CLOSED else self.close_if_drained())]

    def fail(self, pool: BlockPool, kind: FailureKind, code: str, text: str, event: SinkEvent = SinkEvent.FAILED) -> list[Effect]:
        """End, and tell the router why. What is committed stays in the cache for the next attempt."""
        return self.end(pool, event, code, Failed(self.transfer, kind, code, text))

    def close_if_drained(self) -> list[Effect]:
        """CLOSED when no READ may write our blocks any more."""
        if self.state is not SinkState.DRAINING or self.reads_in_flight:
            return []
        self._advance(SinkEvent.DRAINED)
        return [self.say_closed()]

    def say_closed(self) -> Send:
        """Nothing is held here any more."""
        return Send(self.router, Closed(self.transfer, self.reason))

    # -- timers --------------------------------------------------------------------------------------------------------

    def pass_deadline(self, pool: BlockPool) -> list[Effect]:
        """The request's time is over. What is DONE has not failed: its router had all that time to take it."""
        if self.state is SinkState.DONE:
            return self.end(pool, SinkEvent.DEADLINE_PASSED, "deadline")
        return self.fail(pool, FailureKind.FATAL, "deadline_exceeded", "the request's deadline has passed", SinkEvent.DEADLINE_PASSED)

    def tick(self, pool: BlockPool, now_s: float) -> list[Effect]:
        """Look at the timers, but for READs that are overdue: those concern every transfer of the peer."""
        if self.is_live and now_s >= self.deadline_s:
            return self.pass_deadline(pool)
        if self.needs_source and self.is_heard and now_s >= self.heard_s + self._timers.no_progress_s:
            return self.miss_progress(pool)
        effects: list[Effect] = []
        for number, chunk in self.chunks.items():
            if chunk.read_id is not None:
                effects += self._suspect(chunk, now_s)
            elif self.state is SinkState.FILLING and now_s >= chunk.asked_s + self._timers.repeat_s:
                effects += self.ask_again(pool, number, now_s)
        return effects

    def miss_progress(self, pool: BlockPool) -> list[Effect]:
        """The source owns the next step and says nothing: another may do better."""
        return self.fail(pool, FailureKind.RETRYABLE_ELSEWHERE, "no_progress", "the source made no progress")

    def ask_again(self, pool: BlockPool, number: int, now_s: float) -> list[Effect]:
        """Say, or repeat, the question that this chunk waits for: VALIDATE names the blocks *as they were read*."""
        chunk = self.chunks[number]
        chunk.asked_s = now_s
        state = self._state(pool, number)
        if state is BlockState.LANDED:
            return [self._to_source(Validate(self.transfer, number, chunk.read_number, chunk.source_blocks))]
        if state is BlockState.DRAIN:
            return [self._to_source(Resend(self.transfer, (number,), False))]
        return []

    def _suspect(self, chunk: SinkChunk, now_s: float) -> list[Effect]:
        if chunk.is_suspect or self.source is None or now_s < chunk.posted_s + self._timers.read_suspect_s:
            return []
        chunk.is_suspect = True
        return [SuspectPeer(self.source)]

    # -- pieces --------------------------------------------------------------------------------------------------------

    def commit(self, pool: BlockPool, number: int) -> None:
        """All components of all blocks of the chunk at once; the full ones become findable."""
        chunk = self.chunks[number]
        pool.advance(chunk.local_ids, BlockEvent.VALIDATED)
        pool.advance(chunk.local_ids, BlockEvent.ALL_COMPONENTS)
        if self._sharding.num_copies > 1:
            pool.hold(chunk.local_ids, EXCHANGE)
        first = chunk.start // self._layout.block_size_tokens
        for block_id, key in zip(chunk.local_ids, self._keys[first:], strict=False):
            pool.publish(block_id, key)
        self.committed.add(number)

    def _share(self, number: int) -> list[Effect]:
        """Each byte has crossed the wire once; the ranks that did not read a block get it from the one that did."""
        chunk = self.chunks[number]
        copies = self._sharding.copies(chunk.start // self._layout.block_size_tokens, chunk.local_ids)
        return [ShareBlocks(copies)] if copies else []

    def _ready_if_whole(self, pool: BlockPool) -> list[Effect]:
        if self.state is not SinkState.FILLING or not self.has_everything:
            return []
        num_arrived = sum(self.chunks[number].end - self.chunks[number].start for number in self.committed)
        if num_arrived != self.num_tokens - self.have_tokens:
            text = f"{num_arrived} tokens arrived and {self.num_tokens - self.have_tokens} were missing"
            return self.fail(pool, FailureKind.FATAL, "protocol_mismatch", text)
        self._advance(SinkEvent.FILLED)
        return [Ready(self.transfer)]

    def _fits(self, message: Seal) -> bool:
        """Whether the chunk is one that a correct source could announce: whole blocks, all components and layers, inside, apart."""
        size = self._layout.block_size_tokens
        aligned = message.start % size == 0 and (message.end % size == 0 or message.end == self.num_tokens)
        inside = self.have_tokens <= message.start < message.end <= self.num_tokens
        complete = len(message.blocks) == self._num_blocks(message.end) - message.start // size
        known = self.chunks.get(message.chunk)
        same = known is None or (known.start, known.end) == (message.start, message.end)
        others = [chunk for number, chunk in self.chunks.items() if number != message.chunk]
        apart = all(message.end <= chunk.start or chunk.end <= message.start for chunk in others)
        whole = message.component_mask == self._layout.component_mask and message.layer_range is None
        return aligned and inside and complete and same and apart and whole

    def _state(self, pool: BlockPool, number: int) -> BlockState:
        return pool.state(self.chunks[number].local_ids[0])

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._layout.block_size_tokens)

    def _say_taken(self) -> Send:
        return self._to_source(Taken(self.transfer, tuple(sorted(self.committed)), self.has_record_answer))

    def _to_source(self, message: Cancel | Resend | Taken | Validate) -> Send:
        assert self.source is not None, "a transfer that is filled locally has no source to speak to"
        return Send(self.source, message)

    def _advance(self, event: SinkEvent) -> None:
        before, self.state = self.state, advance(SINK_TRANSITIONS, self.state, event)
        if before is not self.state:
            logger.debug(
                "sink transfer moved request_id=%s attempt=%d state=%s", self.transfer.request_id, self.transfer.attempt, self.state.value
            )
