"""From plan to tensors: rows, slots and the rectangles of rows that need scores."""

import numpy as np
import pytest

from glm_runtime.config import GlmConfig
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.step_batch import StepBatch, group_scored_rows
from kv_transfer.identity import BlockId, SequenceId
from tests.glm_checkpoints import TINY


@pytest.fixture(scope="module")
def config() -> GlmConfig:
    return GlmConfig.from_checkpoint(TINY)


def piece(name: str, tokens: list[int], start: int, blocks: list[int]) -> SequenceSlice:
    return SequenceSlice(sequence_id=SequenceId(name), tokens=tokens, start=start, block_table=[BlockId(block) for block in blocks])


def batch_of(config: GlmConfig, *pieces: SequenceSlice, row_tile: int = 1) -> StepBatch:
    return build_batch(StepPlan(step_number=1, slices=pieces), config, block_size_tokens=64, num_blocks=100, row_tile=row_tile)


def test_rows_of_a_mixed_step(config: GlmConfig) -> None:
    batch = batch_of(config, piece("a", [7, 8, 9], 62, [5, 3]), piece("b", [1], 130, [9, 2, 40, 41]), row_tile=8)
    assert batch.tokens.tolist() == [7, 8, 9, 1, 0, 0, 0, 0]
    assert batch.positions.tolist() == [62, 63, 64, 130, 0, 0, 0, 0]
    assert batch.slots.tolist() == [5 * 64 + 62, 5 * 64 + 63, 3 * 64, 40 * 64 + 2, -1, -1, -1, -1]
    assert batch.visible.tolist() == [63, 64, 65, 131, 0, 0, 0, 0]
    assert batch.block_tables.tolist() == [[5, 3, 0], [9, 2, 40]], "blocks beyond the last row are ignored"
    assert (batch.num_rows, batch.max_visible) == (4, 131)


def test_decode_rows_are_built_like_the_last_rows_of_chunks(config: GlmConfig) -> None:
    """One row a sequence takes another path than chunks do."""
    ends = [(1, [9]), (64, [5]), (65, [5, 3]), (130, [9, 2, 40, 41])]
    decoded = batch_of(config, *[piece(str(n), [n], end - 1, blocks) for n, (end, blocks) in enumerate(ends)], row_tile=8)
    chunked = batch_of(config, *[piece(str(n), [7] * (end - 1) + [n], 0, blocks) for n, (end, blocks) in enumerate(ends)])
    last = [span.row_end - 1 for span in chunked.spans]
    for name in ("tokens", "positions", "slots", "row_sequences", "visible"):
        assert getattr(decoded, name)[:4].tolist() == getattr(chunked, name)[last].tolist(), name
    assert decoded.slots[4:].tolist() == [-1] * 4
    assert not decoded.visible[4:].any()
    assert decoded.block_tables.tolist() == chunked.block_tables.tolist()


def test_rows_that_see_at_most_topk_tokens_are_not_scored(config: GlmConfig) -> None:
    topk = config.index_topk
    assert batch_of(config, piece("a", [1] * topk, 0, [1])).scored == ()
    (scored,) = batch_of(config, piece("a", [1] * (topk + 2), 0, [1, 2])).scored
    assert scored.rows.tolist() == [[topk, topk + 1]]
    assert scored.positions.tolist() == [[topk, topk + 1]]
    assert scored.block_tables.tolist() == [[1, 2, 0, 0, 0, 0, 0, 0]], "whole key tiles of 512 tokens"


def test_decode_rows_of_similar_length_share_a_rectangle(config: GlmConfig) -> None:
    long_table = list(range(20, 40))
    pieces = [piece("short", [1], 100, [1, 2]), piece("long", [1], 1200, long_table), piece("same", [1], 500, list(range(3, 11)))]
    batch = batch_of(config, *pieces, piece("dense", [1], 20, [11]))
    assert sorted(scored.rows.tolist() for scored in batch.scored) == [[[0], [2]], [[1]]]


def test_padding_of_a_rectangle_is_at_most_half(config: GlmConfig) -> None:
    spans = batch_of(config, *[piece(str(n), [1], n * 400 + 100, [0] * 130) for n in range(20)]).spans
    tables = np.zeros((20, 130), dtype=np.int64)
    for scored in group_scored_rows(spans, tables, index_topk=64, block_size_tokens=64, tile_blocks=8):
        needed = -(-(scored.positions.flatten() + 1) // 512)
        assert scored.block_tables.shape[1] // 8 < 2 * int(needed.min())


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (piece("a", [], 0, [1]), "has no tokens"),
        (piece("a", [1, 2], 63, [1]), "needs 2 blocks, has 1"),
        (piece("a", [1], 0, [100]), "outside the pool"),
        (piece("a", [1], 0, [-1]), "negative block"),
        (piece("a", [2560], 0, [1]), "outside the vocabulary"),
        (piece("a", [-1], 0, [1]), "negative token"),
    ],
)
def test_a_wrong_plan_is_a_bug(config: GlmConfig, bad: SequenceSlice, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        batch_of(config, bad)
