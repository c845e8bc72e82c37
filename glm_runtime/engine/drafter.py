"""Runs the MTP layer beside the target's steps: keeps its keys as far as the target's, and makes the next step's drafts.

Knows: which rows of a step stand and which token follows each. Does not know how many drafts pay (the schedulers, `draft_stop.py`) or
how one is guessed (`draft_run.py`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from glm_runtime.draft_steps import DraftSteps
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.draft_run import DraftRun
from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.mtp import MtpLayer
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.lock_step import LockStep
from glm_runtime.recorded_forward import Computed, RecordedForward
from glm_runtime.sampling.parameters import is_greedy
from glm_runtime.sampling.ratio_test import DraftSource, Probabilities
from glm_runtime.step_batch import StepBatch
from kv_transfer.identity import SequenceId

Runs = Mapping[SequenceId, tuple[int, ...]]


class Drafter:
    """One MTP layer bound to one pool. Called between target steps, on their thread, under inference mode.

    draws: drafts of sequences that are not greedy are drawn from the layer's distribution, not its best token.
    proposals: what the drafts of the newest step were drawn from, for those that were; a sequence that is not in the next step loses them.
    num_steps: draft steps that the newest `follow` has made, those of other workers that it joined included.
    lock_step: every worker of the replica makes as many passes of the layer, in `seed` and in `follow` or `join`.
    """

    def __init__(self, mtp: MtpLayer, cache: PagedCache, tables: BlockTables, lock_step: LockStep, *, draws: bool = False) -> None:
        self.proposals: dict[SequenceId, Sequence[Probabilities]] = {}
        self.num_steps = 0
        self._mtp = mtp
        self._cache = cache
        self._tables = tables
        self._draws = draws
        self._first = RecordedForward(self._compute_first, mtp.target, cache)
        self._steps = DraftSteps(mtp, cache, lock_step)

    def seed(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts for the slices that bring a hidden state: step 0 is computed again on the row before them.

        The keys that it stores there are the ones that came with the blocks, bit by bit. Called where any worker has such slices.
        """
        seeded = [piece for piece in plan.slices if _is_seeded(piece)]
        if not seeded:
            self._join()
            return plan
        rows = [
            SequenceSlice(sequence_id=piece.sequence_id, tokens=piece.tokens[:1], start=piece.start - 1, block_table=piece.block_table)
            for piece in seeded
        ]
        dtype = self._mtp.target.numerics.dtype
        hidden = torch.stack([torch.frombuffer(bytearray(piece.seed_hidden or b""), dtype=dtype) for piece in seeded])
        wanted = {piece.sequence_id: piece.num_seed_drafts for piece in seeded}
        drafts = self._run(rows, hidden, wanted, self._sources(seeded, {}), None)  # the plan has rows for all of them
        return dataclasses.replace(plan, slices=tuple(_with_drafts(piece, drafts) for piece in plan.slices))

    def join(self) -> None:
        """What `follow` is for a worker that has no rows in the step."""
        self.proposals = {}
        self._join()

    def follow(self, plan: StepPlan, hidden: Tensor, runs: Runs) -> Runs:
        """Draft step 0 over the rows of a target step that stand, then the further steps of those that want drafts.

        hidden: [rows, hidden] of all the plan's rows. runs: what was drawn, by sequence. Returns the drafts of the next step.
        """
        rows = [_shifted(piece, runs.get(piece.sequence_id, ())) for piece in plan.slices]
        num_kept = [len(piece.tokens) for piece in rows]
        if sum(num_kept) < plan.num_tokens:
            hidden = hidden.index_select(0, torch.tensor(list(_kept_rows(plan.slices, num_kept)), dtype=torch.int64))
        wanted = {piece.sequence_id: piece.num_next_drafts for piece in plan.slices if _goes_on(piece, runs)}
        self.proposals = {}
        self.num_steps = 0
        return self._run(rows, hidden, wanted, self._sources(plan.slices, runs), plan.stop_rule)

    def _sources(self, slices: Sequence[SequenceSlice], runs: Runs) -> dict[SequenceId, DraftSource]:
        """How drafts are drawn of those that draw them; `runs`: what stands between the slice's first token index and the first draft."""
        if not self._draws:
            return {}
        return {
            piece.sequence_id: DraftSource(
                seed=piece.sampling.seed,
                token_index=piece.token_index + len(runs.get(piece.sequence_id, ())),
                temperature=piece.sampling.temperature,
            )
            for piece in slices
            if piece.sampling is not None and not is_greedy(piece.sampling)
        }

    def _join(self) -> None:
        self._mtp.join()
        self._join_further()

    def _join_further(self) -> None:
        """Join the draft steps after step 0, where no sequence here wants any."""
        num_joined = self._steps.join()
        self.num_steps = 1 + num_joined if num_joined else 0

    def _run(
        self,
        slices: Sequence[SequenceSlice],
        hidden: Tensor,
        wanted: Mapping[SequenceId, int],
        sources: Mapping[SequenceId, DraftSource],
        rule: StopRule | None,
    ) -> Runs:
        batch = self._batch(slices)
        recycled, selection = self._first.run(batch, hidden)
        if not wanted:
            self._join_further()
            return {}
        assert selection is not None, "step 0 chooses what the further steps attend to"
        selection = self._mtp.whole_selection(selection, batch, self._cache)
        drafting = [
            (piece.sequence_id, span.row_end - 1) for span, piece in zip(batch.spans, slices, strict=True) if piece.sequence_id in wanted
        ]
        rows = torch.tensor([row for _, row in drafting], dtype=torch.int64)
        names = [name for name, _ in drafting]
        run = DraftRun([wanted[name] for name in names], rule, [sources.get(name) for name in names], self._mtp.target.numerics.impl)
        self.num_steps = self._steps.run(recycled, batch, selection, rows, run.take_scores)
        for name, proposed, num_kept in zip(names, run.proposals, run.num_kept, strict=True):
            if proposed:
                self.proposals[name] = proposed[:num_kept]
        return dict(zip(names, run.drafts(), strict=True))

    def _compute_first(self, batch: StepBatch, hidden: Tensor | None) -> Computed:
        assert hidden is not None, "step 0 reads the rows' hidden states"
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, batch.tokens.shape[0] - hidden.shape[0]))
        return Computed(*self._mtp.forward(padded, batch, self._cache))

    def _batch(self, slices: Sequence[SequenceSlice]) -> StepBatch:
        return build_batch(
            StepPlan(step_number=0, slices=tuple(slices)),
            self._mtp.target.config,
            block_size_tokens=self._cache.block_size_tokens,
            num_blocks=self._cache.num_blocks,
            row_tile=self._mtp.target.numerics.gemm.row_tile,
            tables=self._tables,
        )


def needs_seed(plan: StepPlan) -> bool:
    """Whether drafts are made before the step."""
    return any(map(_is_seeded, plan.slices))


def _is_seeded(piece: SequenceSlice) -> bool:
    return piece.seed_hidden is not None and piece.num_seed_drafts > 0


def _with_drafts(piece: SequenceSlice, drafts: Runs) -> SequenceSlice:
    found = drafts.get(piece.sequence_id)
    if found is None:
        return piece
    return msgspec.structs.replace(piece, tokens=(*piece.tokens, *found), num_drafts=len(found), num_seed_drafts=0, seed_hidden=None)


def _shifted(piece: SequenceSlice, run: tuple[int, ...]) -> SequenceSlice:
    """The slice's rows that stand, each with the token after it."""
    if piece.sampling is None:
        assert piece.next_token is not None, f"{piece.sequence_id} goes on after this chunk, and the plan does not say with what"
        run = (piece.next_token,)
    return SequenceSlice(
        sequence_id=piece.sequence_id,
        tokens=(*piece.tokens[1 : piece.num_given], *run),
        start=piece.start,
        block_table=piece.block_table,
    )


def _goes_on(piece: SequenceSlice, runs: Runs) -> bool:
    """Whether drafts are wanted: none are for a request that has ended, whose last tokens would wait for them."""
    sampling, run = piece.sampling, runs.get(piece.sequence_id, ())
    if sampling is None or not piece.num_next_drafts or piece.token_index + len(run) >= sampling.max_tokens:
        return False
    return not any(stop in run for stop in sampling.stop_token_ids)


def _kept_rows(slices: Sequence[SequenceSlice], num_kept: Sequence[int]) -> Iterator[int]:
    """Numbers of the plan's rows that stand; in each slice they are the first ones."""
    start = 0
    for piece, count in zip(slices, num_kept, strict=True):
        yield from range(start, start + count)
        start += len(piece.tokens)
