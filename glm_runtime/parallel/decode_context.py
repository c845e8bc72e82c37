"""Which tokens of a sequence a rank keeps when ranks share its cache: every `size`-th block, in a pool of its own. Pure.

    blocks of a sequence      0    1    2    3    4    5    6    7    8 ...
    rank that keeps it        0    1    2    3    0    1    2    3    0
    which of that rank's      0    0    0    0    1    1    1    1    2

A block id of such a worker is group-wide: it names a rank, its home, and a block of that rank's pool. Block i of a sequence has home
i % size, so a rank's own blocks are every `size`-th entry of a block table, and its own tokens, counted alone, are whole blocks but for
the sequence's last one. Source: FACTS 6.4, with interleave = block size. What an id means, and which rank serves which block to another
worker: `kv_transfer/geometry.py`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_runtime.step_batch import RowSpan, ScoredRows, ScoredShare, StepBatch
from kv_transfer.geometry import CacheSharding
from kv_transfer.identity import BlockId

Ids = NDArray[np.int64]


def home_of(block_id: int, size: int) -> int:
    """The rank, of `size` in a decode context group, that keeps a group-wide block."""
    return CacheSharding.by_block(size).home(BlockId(block_id))


def local_block(block_id: int, size: int) -> int:
    """Which block of its home's pool a group-wide block is."""
    return CacheSharding.by_block(size).local_id(BlockId(block_id))


def group_block(local: int, home: int, size: int) -> BlockId:
    """The group-wide id of a block of one rank's pool: undoes `home_of` and `local_block`."""
    return CacheSharding.by_block(size).group_id(home, BlockId(local))


@dataclass(frozen=True, slots=True)
class BlockShare:
    """What rank `rank` of `size` keeps of every sequence. One rank keeps everything."""

    rank: int = 0
    size: int = 1
    block_size_tokens: int = 64

    def local_lengths(self, lengths: Ids) -> Ids:
        """How many of the first `lengths` tokens of a sequence lie here; of any shape, new."""
        whole = lengths // (self.block_size_tokens * self.size) * self.block_size_tokens
        rest = lengths - whole * self.size - self.rank * self.block_size_tokens
        clipped: Ids = whole + np.clip(rest, 0, self.block_size_tokens)
        return clipped

    def global_tokens(self, local_tokens: Tensor) -> Tensor:
        """Token positions of the sequence for positions among this rank's own, any shape, new; -1 stays -1."""
        block = torch.div(local_tokens, self.block_size_tokens, rounding_mode="floor")
        tokens = (block * self.size + self.rank) * self.block_size_tokens + (local_tokens - block * self.block_size_tokens)
        return torch.where(local_tokens < 0, -1, tokens)

    def local_table(self, block_ids: Sequence[BlockId], first: int) -> Ids:
        """Blocks first, first + 1, ... of a sequence as blocks of this rank's pool; -1 for those of other ranks.

        Raises AssertionError for a block whose home is not that of its place.
        """
        ids = np.array(block_ids, dtype=np.int64)
        homes = np.arange(first, first + len(ids)) % self.size
        assert (ids % self.size == homes).all(), f"block {first} and those after it, {ids.tolist()}, are not of ranks {homes.tolist()}"
        return np.where(homes == self.rank, ids // self.size, -1)

    def scored_share(self, batch: StepBatch, tile_blocks: int) -> ScoredShare | None:
        """The rows of a step that are scored, over this rank's own blocks; None where there are none.

        batch: its block tables hold -1 for blocks of other ranks. tile_blocks: as `group_scored_rows`.
        """
        if not batch.scored:
            return None
        members = [span for rectangle in batch.scored for span in rectangle.members]
        rows = np.concatenate([np.arange(span.row_start, span.row_end) for span in members])
        visible = self.local_lengths(batch.visible.numpy()[rows])
        tables = _at_least_one_column(batch.block_tables.numpy()[:, self.rank :: self.size])
        at = torch.from_numpy(rows)
        return ScoredShare(
            rows=at,
            batch=dataclasses.replace(
                batch,
                tokens=batch.tokens[at],
                positions=batch.positions[at],
                slots=batch.slots[at],
                row_sequences=batch.row_sequences[at],
                visible=torch.from_numpy(visible),
                block_tables=torch.from_numpy(tables),
                spans=(),
                scored=self._rectangles(batch.scored, visible, tables, tile_blocks),
                num_rows=len(rows),
                max_visible=int(visible.max()),
            ),
        )

    def _rectangles(self, scored: Sequence[ScoredRows], visible: Ids, tables: Ids, tile_blocks: int) -> tuple[ScoredRows, ...]:
        """The step's rectangles, whose rows are numbered through: sequences of similar length have similar shares."""
        rectangles = []
        row = 0
        for rectangle in scored:
            members, first = [], row
            for span in rectangle.members:
                members.append(RowSpan(span.sequence, row, row + span.num_rows, span.start))
                row += span.num_rows
            num_blocks = max(1, -(-int(visible[first:row].max()) // self.block_size_tokens))
            rectangles.append(ScoredRows(tuple(members), tables, num_blocks + -num_blocks % tile_blocks, visible))
        return tuple(rectangles)


def _at_least_one_column(tables: Ids) -> Ids:
    return np.ascontiguousarray(tables) if tables.shape[1] else np.zeros((tables.shape[0], 1), dtype=np.int64)
