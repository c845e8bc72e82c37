"""Turns a step plan into the tensors of a step. Checks what a wrong plan would silently corrupt."""

import torch

from glm_runtime.config import GlmConfig
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.step_batch import RowSpan, StepBatch, group_scored_rows


def build_batch(plan: StepPlan, config: GlmConfig, *, block_size_tokens: int, num_blocks: int, row_tile: int) -> StepBatch:
    """The step's rows in the order of the plan's slices, padded to a multiple of `row_tile`.

    Raises AssertionError for a slice that breaks its rules: no tokens, a block table too short or naming a block outside the pool,
    a token outside the vocabulary.
    """
    spans = _spans(plan)
    block_tables = _block_tables(plan, block_size_tokens, num_blocks)
    num_rows = plan.num_tokens
    num_padding = -num_rows % row_tile
    tokens = torch.tensor([token for piece in plan.slices for token in piece.tokens] + [0] * num_padding)
    assert int(tokens.min()) >= 0, "a plan holds a negative token id"
    assert int(tokens.max()) < config.vocab_size, "a plan holds a token id outside the vocabulary"
    positions = torch.cat([torch.arange(span.start, span.end) for span in spans] + [torch.zeros(num_padding, dtype=torch.int64)])
    lengths = torch.tensor([span.num_rows for span in spans])
    row_sequences = torch.cat([torch.arange(len(spans)).repeat_interleave(lengths), torch.zeros(num_padding, dtype=torch.int64)])
    is_row = torch.arange(num_rows + num_padding) < num_rows
    blocks = block_tables[row_sequences, torch.div(positions, block_size_tokens, rounding_mode="floor")]
    return StepBatch(
        tokens=tokens,
        positions=positions,
        slots=torch.where(is_row, blocks * block_size_tokens + positions % block_size_tokens, -1),
        row_sequences=row_sequences,
        visible=torch.where(is_row, positions + 1, 0),
        block_tables=block_tables,
        spans=spans,
        scored=group_scored_rows(
            spans,
            block_tables,
            index_topk=config.index_topk,
            block_size_tokens=block_size_tokens,
            tile_blocks=KEY_TILE_TOKENS // block_size_tokens,
        ),
        num_rows=num_rows,
        max_visible=max(span.end for span in spans),
    )


def _spans(plan: StepPlan) -> tuple[RowSpan, ...]:
    spans = []
    row = 0
    for sequence, piece in enumerate(plan.slices):
        assert piece.tokens, f"slice of {piece.sequence_id} has no tokens"
        spans.append(RowSpan(sequence, row, row + len(piece.tokens), piece.start))
        row += len(piece.tokens)
    return tuple(spans)


def _block_tables(plan: StepPlan, block_size_tokens: int, num_blocks: int) -> torch.Tensor:
    """[R, B] int64, filled with block 0 beyond what a slice needs."""
    needed = [-(-piece.end // block_size_tokens) for piece in plan.slices]
    for piece, count in zip(plan.slices, needed, strict=True):
        _check_table(piece, count, num_blocks)
    width = max(needed)
    rows = [list(piece.block_table[:count]) + [0] * (width - count) for piece, count in zip(plan.slices, needed, strict=True)]
    return torch.tensor(rows, dtype=torch.int64)


def _check_table(piece: SequenceSlice, count: int, num_blocks: int) -> None:
    assert len(piece.block_table) >= count, f"{piece.sequence_id} needs {count} blocks, has {len(piece.block_table)}"
    assert min(piece.block_table[:count]) >= 0, f"{piece.sequence_id} has a negative block id"
    assert max(piece.block_table[:count]) < num_blocks, f"{piece.sequence_id} has a block id outside the pool of {num_blocks}"
