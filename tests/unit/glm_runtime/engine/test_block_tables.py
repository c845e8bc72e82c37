"""Kept block tables against tables made anew, whatever happens to the lists between steps."""

import random

import pytest

from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.step_plan import SequenceSlice
from kv_transfer.identity import BlockId, SequenceId


def piece(name: str, table: "list[BlockId] | tuple[BlockId, ...]") -> SequenceSlice:
    return SequenceSlice(sequence_id=SequenceId(name), tokens=[1], start=0, block_table=table)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def change(table: list[BlockId], generator: random.Random) -> list[BlockId]:
    """What schedulers do: grow in place, roll back, start again elsewhere; and what a bug might: change a block in the middle."""
    fresh = [BlockId(generator.randrange(50)) for _ in range(generator.randrange(1, 6))]
    match generator.choice(("grow", "grow", "grow", "cut", "replace", "same-length", "keep")):
        case "grow":
            table += fresh
        case "cut":
            del table[1 + len(table) // 2 :]
        case "replace":
            return fresh
        case "same-length":
            table[generator.randrange(len(table))] = fresh[0]
    return table


@pytest.mark.parametrize("seed", range(5))
def test_kept_tables_equal_the_lists(seed: int) -> None:
    generator = random.Random(seed)
    tables, kept = {str(name): ids(name) for name in range(6)}, BlockTables(50)
    for _ in range(200):
        names = generator.sample(sorted(tables), generator.randrange(1, 6))
        for name in names:
            tables[name] = change(tables[name], generator)
        needed = [generator.randrange(1, len(tables[name]) + 1) for name in names]
        rows = kept.rows([piece(name, tables[name]) for name in names], needed)
        width = max(needed)
        assert rows.tolist() == [tables[name][:count] + [0] * (width - count) for name, count in zip(names, needed, strict=True)]


def test_what_was_returned_stays_as_it_was() -> None:
    kept, table = BlockTables(50), ids(7, 8)
    first = kept.rows([piece("a", table)], [2])
    table += ids(9)
    kept.rows([piece("a", table)], [3])
    kept.rows([piece("a", tuple(ids(1, 2, 3)))], [3])
    assert first.tolist() == [[7, 8]]


@pytest.mark.parametrize(
    ("grown", "says"),
    [(ids(7, 8, 50), "outside the pool of 50"), (ids(7, 8, -1), "negative block id"), (ids(7, 8), "needs 3 blocks, has 2")],
)
def test_new_blocks_are_checked_too(grown: list[BlockId], says: str) -> None:
    kept = BlockTables(50)
    kept.rows([piece("a", ids(7, 8))], [2])
    with pytest.raises(AssertionError, match=says):
        kept.rows([piece("a", grown)], [3])
