"""One transfer as its source sees it: what is sealed, what is taken, and when to let go. Without I/O and without a clock.

Knows: PROTOCOL's rules for one source, whose ranks it sees as one. Does not know other transfers, or what became of those that ended
(`source_session.py`). Every method returns the effects to carry out, in order. Methods that are one rule of the protocol are methods of
their own, so that a test can take the rule away and watch an invariant break.
"""

import logging
from typing import NamedTuple

from kv_transfer.block_pool import CACHE, BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.geometry import ONE_RANK, CacheSharding
from kv_transfer.handoff import SOURCE_TRANSITIONS, Dropped, Effect, Send, SourceEvent, SourceState, advance, seal_record
from kv_transfer.identity import BlockId, PeerId, count_tokens
from kv_transfer.messages import (
    Complete,
    Failed,
    FailureKind,
    HandoffRecord,
    Progress,
    Resend,
    Seal,
    SealedBlock,
    Stale,
    StartSource,
    Taken,
    Valid,
    Validate,
)

logger = logging.getLogger(__name__)


class SealedChunk(NamedTuple):
    """Tokens [start, end) as they were announced."""

    start: int
    end: int
    blocks: tuple[SealedBlock, ...]


def answer_validate(pool: BlockPool, message: Validate) -> Valid | Stale:
    """Whether the blocks still carry the generations *as they were read*; never "the present blocks of this chunk"."""
    named = message.blocks
    same = all(0 <= block.block_id < pool.num_blocks and pool.generation(block.block_id) == block.generation for block in named)
    answer = Valid if same else Stale
    return answer(message.transfer, message.chunk, message.read_number)


class SourceHandoff:
    """The source's side of one attempt, from START_SOURCE to RELEASED."""

    def __init__(
        self,
        message: StartSource,
        router: PeerId,
        sink: PeerId,
        timers: ProtocolTimers,
        component_mask: int,
        now_s: float,
        sharding: CacheSharding = ONE_RANK,
    ) -> None:
        self.transfer = message.transfer
        self.router = router
        self.sink = sink
        self.state = SourceState.QUEUED
        self.num_tokens = count_tokens(message.tokens)
        self.need_from = message.need_from
        self.deadline_s = now_s + message.deadline_s
        self.num_computed_tokens = 0
        self.queue_position = 0
        self.chunks: list[SealedChunk] = []
        self.taken: set[int] = set()
        self.record: HandoffRecord | None = None
        self.record_taken = False
        self.lease_until_s = 0.0
        self.is_lapsed = False
        self.next_progress_s = now_s
        self._timers = timers
        self._component_mask = component_mask
        self._sharding = sharding
        self._sealed = Holder(HolderKind.SEALED, self.transfer)
        self._compute = Holder(HolderKind.COMPUTE, self.transfer)

    @property
    def is_live(self) -> bool:
        """Whether anything may still happen."""
        return self.state is not SourceState.RELEASED

    # -- what the worker does ------------------------------------------------------------------------------------------

    def computing(self, pool: BlockPool) -> list[Effect]:
        """The sequence left the queue; its worker has pinned the prefix that it found."""
        self._advance(SourceEvent.COMPUTE_STARTED)
        self.queue_position = 0
        pool.release_all(self._sealed)
        return []

    def progress(self, num_computed_tokens: int, queue_position: int) -> None:
        """What the next PROGRESS says."""
        self.num_computed_tokens = num_computed_tokens
        self.queue_position = queue_position

    def seal(self, pool: BlockPool, start: int, end: int, block_ids: tuple[BlockId, ...], now_s: float) -> list[Effect]:
        """Announce the part of [start, end) that the sink needs, under the sealed holder."""
        size = pool.block_size_tokens
        assert start % size == 0, f"a chunk starts at a block, not at token {start}"
        assert len(block_ids) == -(-(end - start) // size), f"{len(block_ids)} blocks are not those of tokens [{start}, {end})"
        first = max(start, self.need_from)
        if first >= end:
            return []
        needed = block_ids[(first - start) // size :]
        pool.hold(needed, self._sealed)
        blocks = [
            SealedBlock(block_id, pool.generation(block_id), self._sharding.serving_rank(index))
            for index, block_id in enumerate(needed, start=first // size)
        ]
        self.chunks.append(SealedChunk(first, end, tuple(blocks)))
        if self.state is SourceState.COMPUTING:
            self.lease_until_s = now_s + self._timers.lease_s
        self._advance(SourceEvent.CHUNK_SEALED)
        return [self._say_seal(len(self.chunks) - 1)]

    def complete(self, pool: BlockPool, record: HandoffRecord) -> list[Effect]:
        """The last chunk is sealed: no later chunk will read the earlier blocks, so `compute` ends."""
        self._advance(SourceEvent.COMPLETED)
        self.record = seal_record(record)
        pool.release_all(self._compute)
        return [self._say_complete(self.record), *self._release_if_taken(pool)]

    # -- what the sink says --------------------------------------------------------------------------------------------

    def receive_resend(self, message: Resend, now_s: float) -> list[Effect]:
        """Say again what is there; what is not computed yet will be said when it is."""
        self.renew(now_s)
        effects: list[Effect] = [self._say_seal(chunk) for chunk in message.chunks if self._can_say(chunk)]
        if message.record and self.record is not None:
            effects.append(self._say_complete(self.record))
        return effects

    def receive_taken(self, pool: BlockPool, message: Taken, now_s: float) -> list[Effect]:
        """Committed chunks need their sealed holder no more; the transfer ends when nothing is left to take."""
        self.renew(now_s)
        for number in message.chunks:
            if self._can_say(number):
                self.taken.add(number)
                pool.release([block.block_id for block in self.chunks[number].blocks], self._sealed)
        if message.record and self.record is not None:
            self.record_taken = True
        return self._release_if_taken(pool)

    def renew(self, now_s: float) -> None:
        """The sink is alive: sealed blocks stay for another lease."""
        self.lease_until_s = now_s + self._timers.lease_s

    def is_all_taken(self) -> bool:
        """Whether every chunk and the record are in the sink's hands."""
        return self.state is SourceState.COMPLETE and len(self.taken) == len(self.chunks) and self.record_taken

    def inherit(self, pool: BlockPool, older: "SourceHandoff") -> None:
        """Hold what an earlier attempt has sealed before it lets go, until the worker has pinned it (`computing`).

        Only what this attempt's worker will find: indexed whole blocks before its last token. Any other would be held for nothing,
        and could be the very block that is missing.
        """
        num_reusable = (self.num_tokens - 1) // pool.block_size_tokens
        for chunk in older.chunks:
            first = chunk.start // pool.block_size_tokens
            for block in chunk.blocks[: max(num_reusable - first, 0)]:
                if CACHE in pool.holders(block.block_id) and pool.generation(block.block_id) == block.generation:
                    pool.hold([block.block_id], self._sealed)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def end(self, pool: BlockPool, event: SourceEvent, reason: str, failure: Failed | None = None) -> list[Effect]:
        """Let every block go. Steps that were launched keep their own holders."""
        self._advance(event)
        pool.release_all(self._compute)
        pool.release_all(self._sealed)
        return [Dropped(self.transfer, reason, failure)]

    def fail(self, pool: BlockPool, event: SourceEvent, kind: FailureKind, code: str, text: str) -> list[Effect]:
        """End, and tell router and sink why."""
        failure = Failed(self.transfer, kind, code, text)
        return [Send(self.router, failure), Send(self.sink, failure), *self.end(pool, event, code, failure)]

    def end_lease(self, pool: BlockPool) -> list[Effect]:
        """Nothing was heard of the sink for a lease; should it still read, VALIDATE will tell it what it has read."""
        self.is_lapsed = True
        return self.end(pool, SourceEvent.LEASE_ENDED, "lease_ended")

    def pass_deadline(self, pool: BlockPool) -> list[Effect]:
        """The request's time is over."""
        return self.fail(pool, SourceEvent.DEADLINE_PASSED, FailureKind.FATAL, "deadline_exceeded", "the request's deadline has passed")

    def tick(self, pool: BlockPool, now_s: float) -> list[Effect]:
        """Look at the timers."""
        if now_s >= self.deadline_s:
            return self.pass_deadline(pool)
        if self.state in (SourceState.SEALED, SourceState.COMPLETE) and now_s >= self.lease_until_s:
            return self.end_lease(pool)
        if now_s >= self.next_progress_s:
            return self.say_progress(now_s)
        return []

    def say_progress(self, now_s: float) -> list[Effect]:
        """Tell sink and router where the transfer is, so that they need not guess and notice what was lost."""
        self.next_progress_s = now_s + self._timers.progress_interval_s
        message = Progress(self.transfer, self.state.value, self.num_computed_tokens, self.queue_position, len(self.chunks))
        return [Send(self.sink, message), Send(self.router, message)]

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _release_if_taken(self, pool: BlockPool) -> list[Effect]:
        return self.end(pool, SourceEvent.ALL_TAKEN, "taken") if self.is_all_taken() else []

    def _can_say(self, number: int) -> bool:
        return 0 <= number < len(self.chunks) and number not in self.taken

    def _say_seal(self, number: int) -> Send:
        chunk = self.chunks[number]
        return Send(self.sink, Seal(self.transfer, number, chunk.start, chunk.end, chunk.blocks, self._component_mask))

    def _say_complete(self, record: HandoffRecord) -> Send:
        return Send(self.sink, Complete(self.transfer, len(self.chunks), record))

    def _advance(self, event: SourceEvent) -> None:
        before, self.state = self.state, advance(SOURCE_TRANSITIONS, self.state, event)
        if before is not self.state:
            logger.debug(
                "source transfer moved request_id=%s attempt=%d state=%s", self.transfer.request_id, self.transfer.attempt, self.state.value
            )
