"""Every interleaving of small hand-offs, driving the real sessions, hand-offs and pools; and each rule shown to be needed.

Three settings after the design's models: A validation (one chunk; every message lost, late, repeated), B streaming (two chunks,
split stores, torn READs, destroyed agents, quarantine), C attempts (two attempts on the same pair). In all of them no invariant
may break, an end without holders must be reachable from everywhere, and loss, delay or repetition alone may not end an attempt.
"""

import dataclasses
from typing import Any

import pytest

from kv_transfer.block_pool import CACHE, BlockPool, Holder, HolderKind
from kv_transfer.errors import TransferError
from kv_transfer.handoff import BlockEvent, BlockState, Effect, SinkEvent
from kv_transfer.identity import BlockId, Generation, PeerId, TransferId
from kv_transfer.messages import Failed, Gone, OpenSink, Progress, Resend, Seal, Stale, Valid, Validate
from kv_transfer.sink_handoff import SinkChunk, SinkHandoff
from kv_transfer.sink_session import SinkSession
from kv_transfer.source_handoff import SourceHandoff
from kv_transfer.source_session import SourceSession
from tests.property.explorer import DAMAGE, NORMAL, PATIENCE, CanReach, Explorer, Result
from tests.property.handoff_world import CODEC, Setting, World, moves, tidy


def has_ended(w: World) -> bool:
    """No transfer lives, nothing is in flight, and only caches and quarantine hold blocks (I6, I7)."""
    pools_idle = w.source_pool.num_held == w.sink_pool.num_held == 0
    return w.source.num_live == 0 and not w.sink._transfers and pools_idle and not w.flights


def is_settled(w: World) -> bool:
    """The request's fate is known: it runs, it ran, or the last attempt is over."""
    return succeeds(w) or (w.attempt in w.left and not w.sink.is_live(w.transfer(w.attempt)))


def succeeds(w: World) -> bool:
    return w.attempt in w.ready or w.attempt in w.finished


PROGRESS = (
    CanReach("I6, I7: no end without holders can be reached", lambda w: True, has_ended, PATIENCE),
    CanReach("hangs until the request's deadline", lambda w: True, is_settled, NORMAL),
    CanReach("loss, delay or repetition alone ended the attempt", lambda w: not w.faulted, succeeds, NORMAL),
)

VALIDATION = Setting(aborts=False, decodes=True)
STREAMING = Setting(num_chunks=2, source_blocks=2, sink_blocks=2, is_lossy=False, splits_steps=True, destroys=1, decodes=True)
UNPROVEN = dataclasses.replace(STREAMING, is_proven=False)
ATTEMPTS = Setting(attempts=2, is_lossy=False)

QUICK = {"validation": VALIDATION, "streaming": STREAMING, "streaming_unproven": UNPROVEN, "attempts": ATTEMPTS}
LARGE = {
    "validation_with_aborts": dataclasses.replace(VALIDATION, aborts=True),
    "validation_computed_again": dataclasses.replace(VALIDATION, computes_again=1),
    "attempts_of_two_chunks": dataclasses.replace(ATTEMPTS, num_chunks=2, source_blocks=2, sink_blocks=2),
    "attempts_on_a_lossy_network": dataclasses.replace(ATTEMPTS, is_lossy=True, foreign_uses=0, max_reads=1),
}


def explore(setting: Setting, worst: int = DAMAGE, limit: int = 1_000_000) -> Result:
    return Explorer(CODEC, moves, tidy, World.check, PROGRESS, worst, limit).run(World(setting))


@pytest.mark.parametrize("name", QUICK)
def test_no_interleaving_breaks_an_invariant(name: str) -> None:
    result = explore(QUICK[name])
    assert result.violation == "", " | ".join(result.path)
    assert result.num_states > 10_000, "the world has shrunk: it no longer explores what it should"


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_interleaving_of_a_larger_world_breaks_an_invariant(name: str) -> None:
    result = explore(LARGE[name])
    assert result.violation == "", " | ".join(result.path)


# -- the rules, taken away one at a time -------------------------------------------------------------------------------


class NoValidation(SinkHandoff):
    def landed(self, pool: BlockPool, number: int, now_s: float) -> list[Effect]:
        self.commit(pool, number)
        return [self._say_taken(), *self._ready_if_whole(pool)]


class EarlyValidation(SinkHandoff):
    """VALIDATE when the READ is posted; VALID counts before DONE."""

    def receive_seal(self, pool: BlockPool, message: Seal, read_id: int, now_s: float) -> list[Effect]:
        effects = super().receive_seal(pool, message, read_id, now_s)
        chunk = self.chunks.get(message.chunk)
        if chunk is not None and chunk.read_id == read_id:
            effects.append(self._to_source(Validate(self.transfer, message.chunk, chunk.read_number, chunk.source_blocks)))
        return effects

    def receive_valid(self, pool: BlockPool, number: int, read_number: int) -> list[Effect]:
        if number in self.chunks and self.chunks[number].read_id is not None:
            self.chunks[number].is_suspect = True  # stands for "vouched"
            return []
        return super().receive_valid(pool, number, read_number)

    def landed(self, pool: BlockPool, number: int, now_s: float) -> list[Effect]:
        if not self.chunks[number].is_suspect:
            return super().landed(pool, number, now_s)
        self.commit(pool, number)
        return [self._say_taken(), *self._ready_if_whole(pool)]


class AnyReadNumber(SinkHandoff):
    def is_answer(self, pool: BlockPool, number: int, read_number: int) -> bool:
        return number in self.chunks and super().is_answer(pool, number, self.chunks[number].read_number)


class DeafToProgress(SinkHandoff):
    def receive_progress(self, pool: BlockPool, message: Progress, now_s: float) -> list[Effect]:
        if self.needs_source:
            self.hear(now_s)
        return []


class SealIsAlwaysDuplicate(SinkHandoff):
    def is_wanted_again(self, pool: BlockPool, chunk: SinkChunk) -> bool:
        return False


class FreesOnAbort(SinkHandoff):
    """The handle goes with the request."""

    def end(self, pool: BlockPool, event: SinkEvent, reason: str, failure: Failed | None = None) -> list[Effect]:
        for chunk in self.chunks.values():
            if chunk.read_id is not None:
                pool.advance(chunk.local_ids, BlockEvent.READ_ENDED)
                pool.release(chunk.local_ids, Holder(HolderKind.HANDLE, chunk.read_id))
        return super().end(pool, event, reason, failure)


class NoPin(SinkHandoff):
    """have_tokens is a hint: the blocks are found, not held."""

    def open(self, pool: BlockPool) -> list[Effect]:
        effects = super().open(pool)
        pool.release(self.space.table, Holder(HolderKind.REQUEST, self.transfer))
        return effects


class LetsGoWithoutRecord(SourceHandoff):
    def is_all_taken(self) -> bool:
        return self.record is not None and len(self.taken) == len(self.chunks)


class ComputeEndsWithTheChunk(SourceHandoff):
    def seal(self, pool: BlockPool, start: int, end: int, block_ids: tuple[BlockId, ...], now_s: float) -> list[Effect]:
        effects = super().seal(pool, start, end, block_ids, now_s)
        pool.release_all(self._compute)
        return effects


class VouchesForAll(SourceSession):
    """VALID for every transfer that it knows, whatever the generations."""

    def _answer_validate(self, message: Validate, now_s: float) -> Valid | Stale | Gone:
        known = message.transfer in self._live or message.transfer in self._lapsed
        return (Valid if known else Stale)(message.transfer, message.chunk, message.read_number)


class LooksAtPresentBlocks(SourceSession):
    """VALIDATE means "the blocks that I hold for this chunk now"."""

    def _answer_validate(self, message: Validate, now_s: float) -> Valid | Stale | Gone:
        handoff = self._live.get(message.transfer)
        if handoff is None or message.chunk >= len(handoff.chunks):
            return super()._answer_validate(message, now_s)
        same = all(self._pool.generation(block.block_id) == block.generation for block in handoff.chunks[message.chunk].blocks)
        return (Valid if same else Stale)(message.transfer, message.chunk, message.read_number)


class KeepsTooEarly(SinkSession):
    def is_kept(self, handoff: SinkHandoff) -> bool:
        return handoff.needs_source


class HeedsEveryGone(SinkSession):
    def heeds_source_end(self, handoff: SinkHandoff) -> bool:
        return True


class ErrorIsDone(SinkSession):
    def read_failed(self, read_id: int, error: TransferError, now_s: float) -> list[Effect]:
        return self.read_done(read_id, now_s)


class NeverQuarantines(SinkSession):
    def agent_destroyed(self, peer: PeerId, now_s: float) -> list[Effect]:
        self._destroying_proven = True
        return super().agent_destroyed(peer, now_s)


class OpensWhatWasCancelled(SinkSession):
    def may_open(self, transfer: TransferId) -> bool:
        return transfer.sink_incarnation == self._incarnation


class MixesAttempts(SinkSession):
    """A message finds the request, whatever its attempt."""

    def receive(self, peer: PeerId, message: Any, now_s: float) -> list[Effect]:
        live = [handoff.transfer for handoff in self._transfers.values() if handoff.is_live]
        if live and hasattr(message, "transfer"):
            message = dataclass_replace(message, live[-1])
        return super().receive(peer, message, now_s)


def dataclass_replace(message: Any, transfer: TransferId) -> Any:
    return type(message)(**{**{name: getattr(message, name) for name in message.__struct_fields__}, "transfer": transfer})


class LateGeneration(BlockPool):
    """The generation moves when a block comes back, not before the first store of its next use."""

    def _hand_out(self, holder: Holder, free: list[BlockId]) -> BlockId:
        block_id = super()._hand_out(holder, free)
        if self._generations[block_id] > 1:
            self._generations[block_id] = Generation(self._generations[block_id] - 1)
        return block_id

    def _remove(self, block_id: BlockId, holder: Holder) -> None:
        super()._remove(block_id, holder)
        if self._states[block_id] is BlockState.FREE and holder != CACHE:
            self._generations[block_id] = Generation(self._generations[block_id] + 1)


def source_of(handoff: type[SourceHandoff]) -> type[SourceSession]:
    return type("MutantSource", (SourceSession,), {"handoff_type": handoff})


def sink_of(handoff: type[SinkHandoff]) -> type[SinkSession]:
    return type("MutantSink", (SinkSession,), {"handoff_type": handoff})


AGAIN = Setting(computes_again=1, aborts=False, decodes=True)
ANSWERS = frozenset({Valid, Stale, Validate, Gone})
MUTANTS: dict[str, tuple[Setting, dict[str, object], str]] = {
    "a READ is validated": (VALIDATION, {"sink_type": sink_of(NoValidation)}, "I2"),
    "VALIDATE follows DONE": (VALIDATION, {"sink_type": sink_of(EarlyValidation), "never_dead": ANSWERS}, "I2"),
    "VALIDATE compares generations": (VALIDATION, {"source_type": VouchesForAll}, "I2"),
    "VALIDATE names the blocks as they were read": (AGAIN, {"source_type": LooksAtPresentBlocks}, "I2"),
    "the generation moves before the first store": (VALIDATION, {"pool_type": LateGeneration}, "I2"),
    "DONE covers every component": (VALIDATION, {"done_needs_all_components": False}, "I2"),
    "an answer to another read number is ignored": (AGAIN, {"sink_type": sink_of(AnyReadNumber), "never_dead": ANSWERS}, "I2"),
    "PROGRESS tells what is missing": (VALIDATION, {"sink_type": sink_of(DeafToProgress), "foreign_uses": 0}, ""),
    "SEAL after RESEND is no duplicate": (AGAIN, {"sink_type": sink_of(SealIsAlwaysDuplicate)}, ""),
    "released only when the record is taken too": (
        VALIDATION,
        {"source_type": source_of(LetsGoWithoutRecord), "foreign_uses": 0},
        "alone ended",
    ),
    "KEEP only for what was announced": (VALIDATION, {"sink_type": KeepsTooEarly, "foreign_uses": 0}, "alone ended"),
    "GONE is ignored when nothing more is needed": (
        VALIDATION,
        {"sink_type": HeedsEveryGone, "foreign_uses": 0, "never_dead": frozenset({Gone, Resend})},
        "alone ended",
    ),
    "handle stays until DONE": (STREAMING, {"sink_type": sink_of(FreesOnAbort)}, ""),
    "an exception is not DONE": (STREAMING, {"sink_type": ErrorIsDone}, ""),
    "unproven transports quarantine": (UNPROVEN, {"sink_type": NeverQuarantines}, "I1"),
    "compute stays until the last chunk is computed": (STREAMING, {"source_type": source_of(ComputeEndsWithTheChunk)}, ""),
    "OPEN_SINK after its CANCEL is GONE": (
        ATTEMPTS,
        {"sink_type": OpensWhatWasCancelled, "foreign_uses": 0, "never_dead": frozenset({OpenSink})},
        "",
    ),
    "messages carry the attempt": (ATTEMPTS, {"sink_type": MixesAttempts, "foreign_uses": 0}, ""),
    "have_tokens is pinned": (
        Setting(attempts=2, num_chunks=2, source_blocks=2, sink_blocks=2, is_lossy=False, has_sink_stranger=True, foreign_uses=0),
        {"sink_type": sink_of(NoPin)},
        "",
    ),
}


SLOW = {
    "VALIDATE names the blocks as they were read",
    "an answer to another read number is ignored",
    "SEAL after RESEND is no duplicate",
    "have_tokens is pinned",
}


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow if rule in SLOW else ()) for rule in MUTANTS])
def test_each_rule_is_needed(rule: str) -> None:
    setting, changes, finding = MUTANTS[rule]
    result = explore(dataclasses.replace(setting, **changes))  # type: ignore[arg-type]
    assert result.violation, f"without the rule nothing breaks in {result.num_states} states"
    assert finding in result.violation, f"{result.violation}: {' | '.join(result.path)}"
