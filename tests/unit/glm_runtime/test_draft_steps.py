"""Draft steps whose calls are made again give what they give as they are written, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_runtime.draft_steps import DraftSteps, PlainStep
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.mtp import MtpLayer
from glm_runtime.native.build import are_kernels_expected
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.context import one_rank
from glm_runtime.parallel.lock_step import LockStep
from glm_runtime.recorded_forward import MOST_RECORDED_ROWS, Computed, RecordedForward
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.step_batch import StepBatch
from glm_runtime.vocabulary import KnownScores, Scores
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY

pytestmark = pytest.mark.skipif(not are_kernels_expected("auto"), reason="no compiler or no AVX-512: nothing is recorded here")

CONTEXT = 100
"""Beyond the 64 tokens that the indexer selects."""
NUM_DRAFTS = 4

ALONE = LockStep(one_rank().data)
Told = list[tuple[Tensor, Tensor, Tensor]]


class Layer:
    """The shipped MTP layer over a pool of its own, whose first sequences have the keys of a context."""

    def __init__(self, num_sequences: int = 3, **choices: Any) -> None:
        runtime = GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1, **choices))
        assert runtime.mtp is not None
        self.memory = PoolMemory(2 * num_sequences, runtime.layout.block_bytes)
        self.mtp: MtpLayer = runtime.mtp
        self.cache = PagedCache(runtime.layout, self.memory.buffer, 2 * num_sequences)
        self.generator = torch.Generator().manual_seed(0)
        self.step(self.batch([(number, 0, CONTEXT) for number in range(num_sequences)]))

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> StepBatch:
        """Of (sequence, start, number of rows)."""
        slices = tuple(
            SequenceSlice(
                sequence_id=SequenceId(str(number)),
                tokens=torch.randint(2000, (count,), generator=self.generator).tolist(),
                start=start,
                block_table=(BlockId(2 * number), BlockId(2 * number + 1)),
            )
            for number, start, count in rows
        )
        return build_batch(
            StepPlan(step_number=0, slices=slices),
            self.mtp.target.config,
            block_size_tokens=64,
            num_blocks=self.cache.num_blocks,
            row_tile=self.mtp.target.numerics.gemm.row_tile,
        )

    def hidden(self, batch: StepBatch) -> Tensor:
        width = self.mtp.target.config.hidden_size
        return torch.randn(batch.tokens.shape[0], width, generator=self.generator).to(self.mtp.target.numerics.dtype)

    def step(self, batch: StepBatch) -> Computed:
        with torch.inference_mode():
            return Computed(*self.mtp.forward(self.hidden(batch), batch, self.cache))

    def first(self) -> RecordedForward:
        def compute(batch: StepBatch, hidden: Tensor | None) -> Computed:
            assert hidden is not None
            return Computed(*self.mtp.forward(hidden, batch, self.cache))

        return RecordedForward(compute, self.mtp.target, self.cache)


class Guesses:
    """Takes the best of every row, `NUM_DRAFTS` times, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: Told = []

    def guess(self, scores: Scores | KnownScores) -> Tensor | None:
        best, chances = scores.best_with_chances()
        self.told.append((scores.whole().clone(), best.ids.clone(), chances.clone()))
        return best.ids if len(self.told) < NUM_DRAFTS else None


def told_as_written(layer: Layer, batch: StepBatch, first: Computed, rows: Tensor) -> Told:
    assert first.selection is not None
    guesses = Guesses()
    step = PlainStep(layer.mtp, layer.cache, first.hidden.index_select(0, rows), batch, first.selection, rows)
    drafts, number = guesses.guess(step.scores()), 1
    while drafts is not None:
        drafts, number = guesses.guess(step.compute(drafts, number)), number + 1
    return guesses.told


def told_by(steps: DraftSteps, batch: StepBatch, first: Computed, rows: Tensor) -> Told:
    assert first.selection is not None
    guesses = Guesses()
    assert steps.run(first.hidden, batch, first.selection, rows, guesses.guess) == NUM_DRAFTS
    return guesses.told


def assert_same(told: Told, expected: Told) -> None:
    for own, other in zip(told, expected, strict=True):
        assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_every_step_of_every_sequence(num_sequences: int) -> None:
    layer = Layer()
    steps = DraftSteps(layer.mtp, layer.cache, ALONE)
    with torch.inference_mode():
        for start in (CONTEXT, 3, 62, CONTEXT - 1, 20):
            batch = layer.batch([(number, start, 2 + number) for number in range(num_sequences)])
            rows = torch.tensor([span.row_end - 1 for span in batch.spans])
            first = layer.step(batch)
            told = told_by(steps, batch, first, rows)  # before the other, which writes the lists of step 0 again
            assert_same(told, told_as_written(layer, batch, first, rows))
    assert steps.num_recorded == 1


def test_numbers_of_sequences_take_turns() -> None:
    layer = Layer()
    steps = DraftSteps(layer.mtp, layer.cache, ALONE)
    with torch.inference_mode():
        for count in (1, 3, 1, 2, 3, 1):
            batch = layer.batch([(number, CONTEXT, 1) for number in range(count)])
            first, rows = layer.step(batch), torch.arange(count)
            told = told_by(steps, batch, first, rows)
            assert_same(told, told_as_written(layer, batch, first, rows))
    assert steps.num_recorded == 3


@pytest.mark.parametrize(("num_sequences", "choices"), [(MOST_RECORDED_ROWS + 1, {}), (2, {"numerics": "fast"}), (2, {"kernels": "torch"})])
def test_what_is_not_recorded_is_computed_as_it_is_written(num_sequences: int, choices: dict[str, Any]) -> None:
    layer = Layer(num_sequences, **choices)
    steps = DraftSteps(layer.mtp, layer.cache, ALONE)
    with torch.inference_mode():
        batch = layer.batch([(number, CONTEXT, 1) for number in range(num_sequences)])
        hidden, rows = layer.hidden(batch), torch.arange(num_sequences)
        told = told_by(steps, batch, Computed(*layer.mtp.forward(hidden, batch, layer.cache)), rows)
        assert_same(told, told_as_written(layer, batch, Computed(*layer.mtp.forward(hidden, batch, layer.cache)), rows))
    assert steps.num_recorded == 0


def test_step_0_of_few_rows() -> None:
    layer = Layer()
    first, kinds = layer.first(), set()
    with torch.inference_mode():
        for start, counts in [(CONTEXT, [3]), (5, [3]), (62, [4]), (99, [3]), (70, [1, 2]), (5, [2, 1]), (8, [3]), (CONTEXT, [12])]:
            batch = layer.batch([(number, start, count) for number, count in enumerate(counts)])
            hidden = layer.hidden(batch)
            computed = first.run(batch, hidden)
            assert computed.selection is not None
            chosen = computed.selection
            told = [each.clone() for each in (chosen.lists, chosen.addresses, chosen.counts)]
            stored = bytes(layer.memory.buffer)
            expected, selection = layer.mtp.forward(hidden, batch, layer.cache)
            assert torch.equal(computed.hidden, expected)
            assert all(map(torch.equal, told, (selection.lists, selection.addresses, selection.counts)))
            assert bytes(layer.memory.buffer) == stored, "the same keys"
            kinds.add((batch.num_rows, bool(batch.scored)))
    assert first.num_recorded == len(kinds) - 1, "12 rows are not few"


def test_a_result_outlives_the_next_step() -> None:
    layer = Layer()
    first = layer.first()
    with torch.inference_mode():
        batch = layer.batch([(0, CONTEXT, 2)])
        results = [first.run(batch, layer.hidden(batch)).hidden for _ in range(3)]
        assert not torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])
