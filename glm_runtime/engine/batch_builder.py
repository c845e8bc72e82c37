"""Turns a step plan into the tensors of a step. Checks what a wrong plan would silently corrupt.

Arithmetic is numpy's: on a few rows a torch operation costs several times as much as it computes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from glm_runtime.config import GlmConfig
from glm_runtime.engine.block_tables import BlockTables, Ids
from glm_runtime.engine.step_plan import StepPlan
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.step_batch import RowSpan, StepBatch, group_scored_rows

_TOKENS, _SLOTS = 0, 2
"""Columns as `_columns` gives them."""

FEW_ROWS = 12
"""So many a loop has laid out before numpy's ten calls have, whatever sequences they are of."""


def build_batch(
    plan: StepPlan, config: GlmConfig, *, block_size_tokens: int, num_blocks: int, row_tile: int, tables: BlockTables | None = None
) -> StepBatch:
    """The step's rows in the order of the plan's slices, padded to a multiple of `row_tile`.

    tables: what is kept of the block tables of earlier steps in a pool of `num_blocks`, and what this rank has of them.
    Raises AssertionError for a slice that breaks its rules: no tokens, a block table too short or naming a block outside the pool,
    a token outside the vocabulary.
    """
    spans = _spans(plan)
    ends = [span.end for span in spans]
    needed = [-(-end // block_size_tokens) for end in ends]
    tables = tables or BlockTables(num_blocks)
    block_tables = tables.rows(plan.slices, needed)
    num_rows = spans[-1].row_end
    columns = np.zeros((5, num_rows + -num_rows % row_tile), dtype=np.int64)
    columns[_SLOTS, num_rows:] = -1
    make_columns = _counted_columns if num_rows == len(spans) or num_rows <= FEW_ROWS else _columns
    columns[:, :num_rows] = make_columns(plan, spans, block_tables, block_size_tokens)
    assert columns[_TOKENS].min() >= 0, "a plan holds a negative token id"
    assert columns[_TOKENS].max() < config.vocab_size, "a plan holds a token id outside the vocabulary"
    tokens, positions, slots, row_sequences, visible = torch.from_numpy(columns).unbind()
    tile_blocks = KEY_TILE_TOKENS // block_size_tokens
    batch = StepBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        row_sequences=row_sequences,
        visible=visible,
        block_tables=torch.from_numpy(block_tables),
        spans=spans,
        scored=group_scored_rows(
            spans,
            block_tables,
            index_topk=config.index_topk,
            block_size_tokens=block_size_tokens,
            tile_blocks=tile_blocks,
        ),
        num_rows=num_rows,
        max_visible=max(ends),
    )
    return batch if tables.share.size == 1 else dataclasses.replace(batch, share=tables.share.scored_share(batch, tile_blocks))


def _spans(plan: StepPlan) -> tuple[RowSpan, ...]:
    spans = []
    row = 0
    for sequence, piece in enumerate(plan.slices):
        assert piece.tokens, f"slice of {piece.sequence_id} has no tokens"
        end = row + len(piece.tokens)
        spans.append(RowSpan(sequence, row, end, piece.start))
        row = end
    return tuple(spans)


def _columns(plan: StepPlan, spans: Sequence[RowSpan], block_tables: Ids, block_size_tokens: int) -> Sequence[Ids]:
    """Token, position, slot, sequence and number of visible tokens of every row."""
    tokens = np.array([token for piece in plan.slices for token in piece.tokens])
    sequences = np.repeat(np.arange(len(spans)), [span.num_rows for span in spans])
    positions = np.arange(len(tokens)) + np.array([span.start - span.row_start for span in spans])[sequences]
    slots = block_tables[sequences, positions // block_size_tokens] * block_size_tokens + positions % block_size_tokens
    slots = np.maximum(slots, -1)  # of blocks that are -1
    return tokens, positions, slots, sequences, positions + 1


def _counted_columns(plan: StepPlan, spans: Sequence[RowSpan], block_tables: Ids, block_size_tokens: int) -> Sequence[Sequence[int]]:
    """`_columns` row by row: of few rows, and of one row a sequence, where numpy has little to do at once."""
    tokens = [token for piece in plan.slices for token in piece.tokens]
    positions = [position for span in spans for position in range(span.start, span.end)]
    sequences = [span.sequence for span in spans for _ in range(span.row_start, span.row_end)]
    slots = []
    for sequence, position in zip(sequences, positions, strict=True):
        block, offset = divmod(position, block_size_tokens)
        slots.append(max(int(block_tables[sequence, block]) * block_size_tokens + offset, -1))  # of blocks that are -1
    return tokens, positions, slots, sequences, [position + 1 for position in positions]
