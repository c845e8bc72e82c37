"""Forwards of few rows over one pool, recorded: the same calls on the same addresses each time, with other numbers there.

Knows: when the calls of a step are those of another (as many rows, and rows to score or none), and what a step reads beside weights and
cache. Does not know what is computed. More rows, and whatever cannot be recorded, are computed as they are written.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from glm_runtime.index_group import Selection
from glm_runtime.model import GlmModel
from glm_runtime.native.library import library
from glm_runtime.native.recording import Recording, record
from glm_runtime.paged_cache import PagedCache
from glm_runtime.runtime_config import MOST_DRAFTS
from glm_runtime.step_batch import StepBatch

MOST_RECORDED_ROWS = 1 + MOST_DRAFTS
"""One sequence with all its drafts. Of more rows Python takes a smaller part of a step, and each number needs memory of its own."""

MOST_RECORDED_BYTES = 32 << 20
"""Of what a recording makes. Where it is more, the kernels have so much to do that Python does not count."""


def can_record(model: GlmModel) -> bool:
    """Whether steps can be alike: in fast mode lists are as wide as the longest context, and prompts may take another form.

    What several ranks exchange is no kernel's.
    """
    return model.numerics.impl == "native" and model.numerics.is_deterministic and model.context.world.size == 1


class Computed(NamedTuple):
    """hidden: [T, hidden], new. selection: of an MTP layer's step; valid until the next."""

    hidden: Tensor
    selection: Selection | None = None


Compute = Callable[[StepBatch, Tensor | None], Computed]
"""A forward over a step's rows, with the hidden states [T, hidden] of the rows where it reads any."""


class RecordedForward:
    """One computation over one pool. Used by one thread, in inference mode."""

    def __init__(self, compute: Compute, model: GlmModel, cache: PagedCache) -> None:
        """model: whose rotary table and dimensions `compute` has."""
        self._compute = compute
        self._model = model
        self._table_blocks = -(-model.rope.cos.shape[0] // cache.block_size_tokens)
        self._most_rows = MOST_RECORDED_ROWS if can_record(model) else 0
        self._steps: dict[tuple[int, bool], _Step] = {}

    @property
    def num_recorded(self) -> int:
        """Kinds of steps that are recorded."""
        return len(self._steps)

    def run(self, batch: StepBatch, hidden: Tensor | None = None) -> Computed:
        """The computation's result."""
        if batch.num_rows > self._most_rows:
            return self._compute(batch, hidden)
        self._model.rope.prepare(batch.positions)
        step = self._steps.get((batch.num_rows, bool(batch.scored)))
        if step is None:
            return self._record(batch, hidden)
        step.buffers.load(batch, hidden)
        step.recording.replay()
        return Computed(step.result.hidden.clone(), step.result.selection)

    def _record(self, batch: StepBatch, hidden: Tensor | None) -> Computed:
        buffers = _Buffers(batch, hidden, self._table_blocks)
        buffers.load(batch, hidden)
        computed: list[Computed] = []

        def compute() -> tuple[Tensor, ...]:
            result = self._compute(buffers.batch, buffers.hidden)
            computed.append(result)
            chosen = result.selection
            return (result.hidden,) if chosen is None else (result.hidden, chosen.lists, chosen.addresses, chosen.counts)

        recording = record(library(), compute, MOST_RECORDED_BYTES)
        if recording is None:
            self._most_rows = batch.num_rows - 1
            return self._compute(batch, hidden)
        self._steps[batch.num_rows, bool(batch.scored)] = _Step(buffers, recording, computed[0])
        return Computed(computed[0].hidden.clone(), computed[0].selection)


class _Buffers:
    """What one kind of step reads beside weights and cache, at addresses that stay."""

    def __init__(self, batch: StepBatch, hidden: Tensor | None, table_blocks: int) -> None:
        count = batch.num_rows
        self._columns = tuple(torch.zeros(count, dtype=torch.int64) for _ in range(5))
        tokens, positions, slots, row_sequences, visible = self._columns
        self.hidden = None if hidden is None else torch.zeros_like(hidden)
        self.batch = StepBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            row_sequences=row_sequences,
            visible=visible,
            block_tables=torch.zeros(count, table_blocks, dtype=torch.int64),
            spans=(),
            scored=batch.scored,
            num_rows=count,
            max_visible=0,
        )

    def load(self, batch: StepBatch, hidden: Tensor | None) -> None:
        """Take a step's own."""
        given = (batch.tokens, batch.positions, batch.slots, batch.row_sequences, batch.visible)
        for own, column in zip(self._columns, given, strict=True):
            own.copy_(column)
        num_sequences, num_blocks = batch.block_tables.shape
        self.batch.block_tables[:num_sequences, :num_blocks] = batch.block_tables
        if self.hidden is not None and hidden is not None:
            self.hidden.copy_(hidden)


class _Step(NamedTuple):
    buffers: _Buffers
    recording: Recording
    result: Computed
