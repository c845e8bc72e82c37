"""Block tables of running sequences as arrays, so that a step converts the blocks that are new and not those of the whole context.

Knows: which ids it has seen of which sequence. Trusts nobody to say that a table changed: what is kept is compared with what is given.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm_runtime.engine.step_plan import SequenceSlice
from glm_runtime.parallel.decode_context import BlockShare
from kv_transfer.identity import BlockId, SequenceId

Ids = NDArray[np.int64]


class _Table:
    """The first blocks of one sequence, as given and, as far as they are this rank's, as an array with room to grow."""

    def __init__(self, ids: Sequence[BlockId], num_blocks: int, sequence_id: SequenceId, share: BlockShare) -> None:
        self.ids: list[BlockId] = []
        self._share = share
        self._array: Ids = np.empty(0, dtype=np.int64)
        self.extend(ids, num_blocks, sequence_id)

    def extend(self, ids: Sequence[BlockId], num_blocks: int, sequence_id: SequenceId) -> None:
        """Add blocks after a check that they are the pool's."""
        assert min(ids) >= 0, f"{sequence_id} has a negative block id"
        assert max(ids) < num_blocks, f"{sequence_id} has a block id outside the pool of {num_blocks}"
        count = len(self.ids)
        self.ids += ids
        if len(self.ids) > len(self._array):
            self._array = np.resize(self._array, 2 * len(self.ids))
        self._array[count : len(self.ids)] = ids if self._share.size == 1 else self._share.local_table(ids, count)

    def first(self, count: int) -> Ids:
        """The first blocks: a view."""
        return self._array[:count]


class BlockTables:
    """Tables of the sequences of the last step. Used by one thread.

    num_blocks: of the worker. share: which of them this rank keeps, under which number; the others are -1.
    """

    def __init__(self, num_blocks: int, share: BlockShare | None = None) -> None:
        self.num_blocks = num_blocks
        self.share = share or BlockShare()
        self._tables: dict[SequenceId, _Table] = {}

    def rows(self, slices: Sequence[SequenceSlice], needed: Sequence[int]) -> Ids:
        """[R, B], new: the first `needed` blocks of each slice, filled with block 0 to the longest.

        Raises AssertionError for a table that is too short, for ids that are not in the pool, and for those of another rank's place.
        """
        tables = [self._table(piece, count) for piece, count in zip(slices, needed, strict=True)]
        rows = np.zeros((len(slices), max(needed)), dtype=np.int64)
        for row, count, table in zip(rows, needed, tables, strict=True):
            row[:count] = table.first(count)
        self._tables = {piece.sequence_id: table for piece, table in zip(slices, tables, strict=True)}
        return rows

    def _table(self, piece: SequenceSlice, count: int) -> _Table:
        given = piece.block_table
        assert len(given) >= count, f"{piece.sequence_id} needs {count} blocks, has {len(given)}"
        table = self._tables.get(piece.sequence_id)
        if table is None or table.ids[:count] != list(given[: min(count, len(table.ids))]):
            return _Table(given[:count], self.num_blocks, piece.sequence_id, self.share)
        if len(table.ids) < count:
            table.extend(given[len(table.ids) : count], self.num_blocks, piece.sequence_id)
        return table
