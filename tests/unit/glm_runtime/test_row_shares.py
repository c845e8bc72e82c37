"""How prefill context ranks share rows: every row once, equal causal cost, in the sequence's order."""

import numpy as np
import pytest

from glm_runtime.parallel.prefill_context import RowRange, rows_of, zigzag
from glm_runtime.step_batch import RowSpan

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("size", SIZES)
def test_every_row_has_one_rank(size: int) -> None:
    for num_rows in range(1, 70):
        rows = [row for rank in range(size) for part in zigzag(num_rows, size, rank) for row in range(part.start, part.end)]
        assert sorted(rows) == list(range(num_rows))


def test_chunks_are_those_of_the_specification() -> None:
    assert zigzag(16, 2, 0) == (RowRange(0, 4), RowRange(12, 16))
    assert zigzag(16, 2, 1) == (RowRange(4, 8), RowRange(8, 12))
    assert [sum(part.end - part.start for part in zigzag(3, 4, rank)) for rank in range(4)] == [1, 1, 1, 0]


def test_causal_cost_is_equal_where_chunks_are() -> None:
    costs = [sum(row + 1 for part in zigzag(4096, 4, rank) for row in range(part.start, part.end)) for rank in range(4)]
    assert len(set(costs)) == 1


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_several_sequences_keep_their_order(size: int) -> None:
    spans = [RowSpan(0, 0, 5, 10), RowSpan(1, 5, 6, 99), RowSpan(2, 6, 40, 0)]
    parts = [rows_of(spans, size, rank) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
