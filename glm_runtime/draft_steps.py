"""The draft steps of one target step, of the MTP layer bound to one pool: what step 0 guesses, and the steps after it.

A further step computes one row a sequence, stores nothing and attends to what step 0 chose: for the same number of sequences it is the
same kernels on the same addresses each time, with other numbers there. So with the compiled kernels its calls are noted once and made
again (`native/recording.py`). Where torch computes between them, and for many sequences, it is computed as it is written.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from glm_runtime.cache_layout import MTP_MLA_KV
from glm_runtime.index_group import Geometry, Selection
from glm_runtime.mtp import MtpLayer
from glm_runtime.native.library import library
from glm_runtime.native.recording import Recording, record
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.lock_step import LockStep
from glm_runtime.recorded_forward import MOST_RECORDED_BYTES, MOST_RECORDED_ROWS, can_record
from glm_runtime.runtime_config import MOST_DRAFTS
from glm_runtime.step_batch import StepBatch
from glm_runtime.vocabulary import KnownScores, Scores

Guess = Callable[[Scores | KnownScores], Tensor | None]
"""Drafts [R] int64 after R rows of scores, which the next step overwrites, the same on all ranks; None when no further step is wanted."""


class DraftSteps:
    """Draft steps over one pool. Used by one thread, under inference mode.

    lock_step: of this worker with those whose drafts it does not know. All make as many further steps: who wants none joins the others'.
    """

    def __init__(self, mtp: MtpLayer, cache: PagedCache, lock_step: LockStep) -> None:
        self._mtp = mtp
        self._cache = cache
        self._lock_step = lock_step
        self._recorded: dict[int, RecordedStep] = {}
        self._can_record = can_record(mtp.target)

    @property
    def num_recorded(self) -> int:
        """Numbers of sequences whose steps are recorded."""
        return len(self._recorded)

    def run(self, recycled: Tensor, batch: StepBatch, selection: Selection, rows: Tensor, guess: Guess) -> int:
        """Let `guess` draft from step 0, and from further steps until nobody wants more. Returns how many draft steps there were.

        recycled, batch, selection: of step 0. rows: [R] int64, the last accepted row of each sequence that drafts.
        The further steps store nothing: the lists end at the last accepted row, so nobody would read what they store before the next
        step 0 overwrites it.
        """
        step = self._start(recycled.index_select(0, rows), batch, selection, rows)
        drafts = guess(step.scores())
        num_steps = 1
        while drafts is not None:
            self._lock_step.goes_on(True)
            drafts = guess(step.compute(drafts, num_steps))
            num_steps += 1
        return num_steps + self.join()

    def join(self) -> int:
        """Join further steps of other workers until nobody wants one. Returns how many there were."""
        num_steps = 0
        while self._lock_step.goes_on(False):
            self._mtp.join()
            num_steps += 1
        return num_steps

    def _start(self, hidden: Tensor, batch: StepBatch, selection: Selection, rows: Tensor) -> "RecordedStep | PlainStep":
        count = rows.shape[0]
        if self._can_record and count <= MOST_RECORDED_ROWS:
            step = self._recorded.get(count)
            buffers = step.buffers if step is not None else StepBuffers(self._mtp, self._cache, count)
            buffers.fill(hidden, batch, selection, rows)
            step = step or record_step(self._mtp, self._cache, buffers)
            if step is not None:
                self._recorded[count] = step
                return step
            self._can_record = False
        return PlainStep(self._mtp, self._cache, hidden, batch, selection, rows)


class PlainStep:
    """The steps of some sequences, computed as they are written."""

    def __init__(self, mtp: MtpLayer, cache: PagedCache, hidden: Tensor, batch: StepBatch, selection: Selection, rows: Tensor) -> None:
        """hidden: [R, hidden], of `rows`; the others as `DraftSteps.run`."""
        self._mtp = mtp
        self._cache = cache
        self._hidden = hidden
        self._first = batch, selection, rows
        self._chosen: tuple[StepBatch, Selection] | None = None

    def scores(self) -> Scores:
        """Of step 0."""
        return self._mtp.target.scores(self._hidden)

    def compute(self, drafts: Tensor, number: int) -> Scores:
        """Draft step `number`, 1 or more. drafts: [R] int64, of the step before."""
        batch, chosen = self._chosen = self._chosen or self._choose()
        positions = _positions_ahead(self._mtp, batch.positions, number)
        batch = dataclasses.replace(batch, tokens=drafts, positions=positions)
        self._hidden, _ = self._mtp.forward(self._hidden, batch, self._cache, chosen)
        return self.scores()

    def _choose(self) -> tuple[StepBatch, Selection]:
        """One row each, and what it attends to."""
        first, selection, rows = self._first
        tables = first.block_tables.index_select(0, first.row_sequences.index_select(0, rows))
        batch = _one_row_each(first.positions.index_select(0, rows), tables)
        attention = self._mtp.layer.attention
        region = self._cache.region(MTP_MLA_KV, attention.layer)
        return batch, attention.group.compact(selection.lists, rows, batch, region, self._mtp.target.numerics.impl)


class StepBuffers:
    """What a further step of `count` sequences reads beside weights, at addresses that stay."""

    def __init__(self, mtp: MtpLayer, cache: PagedCache, count: int) -> None:
        config, group = mtp.target.config, mtp.layer.attention.group
        self._mtp = mtp
        self.hidden = torch.zeros(count, config.hidden_size, dtype=mtp.target.numerics.dtype)
        self.batch = _one_row_each(torch.zeros(count, dtype=torch.int64), torch.zeros(count, 1, dtype=torch.int64))
        self.chosen = Selection(
            group,
            lists=torch.full((count, group.topk), -1, dtype=torch.int64),
            addresses=torch.full((count, group.topk), -1, dtype=torch.int64),
            counts=torch.zeros(count, dtype=torch.int64),
            block_tables=self.batch.block_tables,
            geometry=Geometry.of(cache.region(MTP_MLA_KV, mtp.layer.attention.layer)),
            generation=group.generation,
        )
        self._steps = torch.arange(MOST_DRAFTS)[:, None]

    def fill(self, hidden: Tensor, batch: StepBatch, selection: Selection, rows: Tensor) -> None:
        """Take what all steps of other sequences read. Arguments as those of `PlainStep`; nothing of them is kept."""
        own = self.chosen
        for buffer, given in ((own.lists, selection.lists), (own.addresses, selection.addresses), (own.counts, selection.counts)):
            torch.index_select(given, 0, rows, out=buffer)
        self.hidden.copy_(hidden)
        self._positions = _positions_ahead(self._mtp, batch.positions.index_select(0, rows), self._steps)  # [steps, R]
        self._mtp.target.rope.prepare(self._positions.flatten())

    def load(self, drafts: Tensor, number: int) -> None:
        """Take what draft step `number` alone reads, but for the hidden state of the step before it."""
        self.batch.tokens.copy_(drafts)
        self.batch.positions.copy_(self._positions[number])


class RecordedStep:
    """The steps of a number of sequences, by calls that were noted over `buffers`."""

    def __init__(
        self, buffers: StepBuffers, first: tuple[Recording, KnownScores], further: tuple[Recording, KnownScores], hidden: Tensor
    ) -> None:
        """first, further: calls, and where they leave the scores of step 0 and of a further step; hidden: where the latter its rows."""
        self.buffers = buffers
        self._first = first
        self._further = further
        self._hidden = hidden

    def scores(self) -> KnownScores:
        """As `PlainStep.scores`, after `buffers.fill`; the same tensors each time."""
        recording, scores = self._first
        recording.replay()
        return scores

    def compute(self, drafts: Tensor, number: int) -> KnownScores:
        """As `PlainStep.compute`; the same tensors each time."""
        recording, scores = self._further
        self.buffers.load(drafts, number)
        recording.replay()
        self.buffers.hidden.copy_(self._hidden)
        return scores


def record_step(mtp: MtpLayer, cache: PagedCache, buffers: StepBuffers) -> RecordedStep | None:
    """Record a step over buffers that are filled. None where calls alone do not make it."""

    def compute_first() -> Sequence[Tensor]:
        known.append(_known_scores(mtp, buffers.hidden))
        return _tensors(known[0])

    def compute_further() -> Sequence[Tensor]:
        hidden, _ = mtp.forward(buffers.hidden, buffers.batch, cache, buffers.chosen)
        known.append(_known_scores(mtp, hidden))
        new_hidden.append(hidden)
        return hidden, *_tensors(known[1])

    known: list[KnownScores] = []
    new_hidden: list[Tensor] = []
    buffers.load(buffers.batch.tokens, 1)
    first, further = (record(library(), compute, MOST_RECORDED_BYTES) for compute in (compute_first, compute_further))
    if first is None or further is None:
        return None
    return RecordedStep(buffers, (first, known[0]), (further, known[1]), new_hidden[0])


def _known_scores(mtp: MtpLayer, hidden: Tensor) -> KnownScores:
    scores = mtp.target.scores(hidden)
    return KnownScores(scores.whole(), *scores.best_with_chances())


def _tensors(known: KnownScores) -> Sequence[Tensor]:
    return known.logits, known.known_best.values, known.known_best.ids, known.known_best.is_finite, known.chances


def _positions_ahead(mtp: MtpLayer, positions: Tensor, number: int | Tensor) -> Tensor:
    """Of draft step `number`. One beyond the longest sequence is never verified; it only must have a position."""
    return (positions + number).clamp_max(mtp.target.rope.cos.shape[0] - 1)


def _one_row_each(positions: Tensor, block_tables: Tensor) -> StepBatch:
    """Rows at `positions` [R], of sequences with these tables: nothing is stored, and what is attended to has been chosen."""
    count = positions.shape[0]
    return StepBatch(
        tokens=torch.zeros_like(positions),
        positions=positions,
        slots=torch.full_like(positions, -1),
        row_sequences=torch.arange(count),
        visible=positions + 1,
        block_tables=block_tables,
        spans=(),
        scored=(),
        num_rows=count,
        max_visible=0,
    )
