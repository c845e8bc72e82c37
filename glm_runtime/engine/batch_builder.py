"""Turns a step plan into the tensors of a step. Checks what a wrong plan would silently corrupt.

Arithmetic is numpy's: on a few rows a torch operation costs several times as much as it computes.
"""

import numpy as np
import torch

from glm_runtime.config import GlmConfig
from glm_runtime.engine.block_tables import BlockTables, Ids
from glm_runtime.engine.step_plan import StepPlan
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.step_batch import RowSpan, StepBatch, group_scored_rows


def build_batch(
    plan: StepPlan, config: GlmConfig, *, block_size_tokens: int, num_blocks: int, row_tile: int, tables: BlockTables | None = None
) -> StepBatch:
    """The step's rows in the order of the plan's slices, padded to a multiple of `row_tile`.

    tables: what is kept of the block tables of earlier steps in a pool of `num_blocks`.
    Raises AssertionError for a slice that breaks its rules: no tokens, a block table too short or naming a block outside the pool,
    a token outside the vocabulary.
    """
    spans = _spans(plan)
    needed = [-(-span.end // block_size_tokens) for span in spans]
    block_tables = (tables or BlockTables(num_blocks)).rows(plan.slices, needed)
    num_rows = spans[-1].row_end
    num_padding = -num_rows % row_tile
    sequences = np.repeat(np.arange(len(spans)), [span.num_rows for span in spans])
    offsets = np.array([span.start - span.row_start for span in spans])
    positions = np.arange(num_rows) + offsets[sequences]
    slots = block_tables[sequences, positions // block_size_tokens] * block_size_tokens + positions % block_size_tokens
    return StepBatch(
        tokens=_padded(_tokens(plan, config), num_padding, 0),
        positions=_padded(positions, num_padding, 0),
        slots=_padded(slots, num_padding, -1),
        row_sequences=_padded(sequences, num_padding, 0),
        visible=_padded(positions + 1, num_padding, 0),
        block_tables=torch.from_numpy(block_tables),
        spans=spans,
        scored=group_scored_rows(
            spans,
            block_tables,
            index_topk=config.index_topk,
            block_size_tokens=block_size_tokens,
            tile_blocks=KEY_TILE_TOKENS // block_size_tokens,
        ),
        num_rows=num_rows,
        max_visible=max([span.end for span in spans]),
    )


def _spans(plan: StepPlan) -> tuple[RowSpan, ...]:
    spans = []
    row = 0
    for sequence, piece in enumerate(plan.slices):
        assert piece.tokens, f"slice of {piece.sequence_id} has no tokens"
        end = row + len(piece.tokens)
        spans.append(RowSpan(sequence, row, end, piece.start))
        row = end
    return tuple(spans)


def _tokens(plan: StepPlan, config: GlmConfig) -> Ids:
    tokens = np.array([token for piece in plan.slices for token in piece.tokens], dtype=np.int64)
    assert tokens.min() >= 0, "a plan holds a negative token id"
    assert tokens.max() < config.vocab_size, "a plan holds a token id outside the vocabulary"
    return tokens


def _padded(rows: Ids, num_padding: int, value: int) -> torch.Tensor:
    return torch.from_numpy(np.pad(rows, (0, num_padding), constant_values=value) if num_padding else rows)
