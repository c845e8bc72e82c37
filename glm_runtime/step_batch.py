"""One step as tensors: which row belongs to which sequence, where it is stored, and which rows the indexer must score.

Legend, here and in all model code: `T` rows of the step, `R` sequences, `H` heads, `D` head dim, `C` latent rank, `S` context
tokens, `P` blocks of the pool, `B` blocks of a table, `K` top-k, `E` experts. Built from a plan by `engine/batch_builder.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_runtime.paged_cache import CacheRegion


class RowSpan(NamedTuple):
    """Rows [row_start, row_end) are positions start, start + 1, ... of sequence `sequence`."""

    sequence: int
    row_start: int
    row_end: int
    start: int

    @property
    def num_rows(self) -> int:
        return self.row_end - self.row_start

    @property
    def end(self) -> int:
        """Tokens of the sequence once this step is stored."""
        return self.start + self.row_end - self.row_start


@dataclass(frozen=True)
class ScoredRows:
    """Rows that see more than index_topk tokens, in a rectangle: sequences of similar length, the same number of rows each.

    members: those rows of each sequence. tables: [R, B], the step's. width_blocks: of the rectangle's own tables. visible: [T], where
    it does not follow from the rows' positions: a rank that shares a cache sees a part of each context. Tensors are made when they are
    asked for: compiled kernels only ask whether there are such rows.
    """

    members: tuple[RowSpan, ...]
    tables: NDArray[np.int64]
    width_blocks: int
    visible: NDArray[np.int64] | None = None

    @cached_property
    def rows(self) -> Tensor:
        """[R', t] row numbers."""
        return self._counted([span.row_start for span in self.members])

    @cached_property
    def positions(self) -> Tensor:
        """[R', t]: of the last token that a row sees; -1 for none."""
        if self.visible is not None:
            return torch.from_numpy(self.visible[self.rows.numpy()] - 1)
        return self._counted([span.start for span in self.members])

    @cached_property
    def block_tables(self) -> Tensor:
        """[R', B'], filled with block 0 beyond a sequence's own blocks."""
        kept = self.tables[[span.sequence for span in self.members], : self.width_blocks]
        return torch.from_numpy(np.pad(kept, ((0, 0), (0, self.width_blocks - kept.shape[1]))))

    def _counted(self, starts: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.array(starts)[:, None] + np.arange(self.members[0].num_rows))


class KeyExchange(Protocol):
    """Other ranks that compute rows of the same step, and whose keys this step's rows attend to as well."""

    def exchange(self, regions: Sequence[CacheRegion]) -> None:
        """Store the other ranks' keys of this step here, too. regions: in which this rank has stored its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Rows [num_rows, T) are padding: token 0 at position 0, stored nowhere, seeing nothing.

    tokens, positions, slots, row_sequences: [T] int64; slots are -1 on padding. block_tables: [R, B] int64, filled with 0.
    visible: [T] int64, tokens a row may attend to, itself included; 0 on padding. key_exchange: where ranks share the step's rows.
    Where ranks share a cache, tokens of other ranks have slot -1 and their blocks are -1 in the tables, which is all that stores and
    conversions of lists need to know; share: the rows that are scored, as this rank sees them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    row_sequences: Tensor
    visible: Tensor
    block_tables: Tensor
    spans: tuple[RowSpan, ...]
    scored: tuple[ScoredRows, ...]
    num_rows: int
    max_visible: int
    key_exchange: KeyExchange | None = None
    share: "ScoredShare | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredShare:
    """The rows of a step that are scored, over the blocks that one of several ranks keeps.

    rows: [T'] int64, rows of the step. batch: those rows, tables of own blocks only, and `visible`: own tokens that a row sees, possibly
    none; one row may see as many as the one before. For `index_select` with scores, and nothing else.
    """

    rows: Tensor
    batch: StepBatch


def exchange_keys(batch: StepBatch, regions: Sequence[CacheRegion]) -> None:
    """After a layer has stored its rows' keys in `regions`, and before a row attends to them: have the other ranks' as well."""
    if batch.key_exchange is not None:
        batch.key_exchange.exchange(regions)


def group_scored_rows(
    spans: Sequence[RowSpan], block_tables: NDArray[np.int64], *, index_topk: int, block_size_tokens: int, tile_blocks: int
) -> tuple[ScoredRows, ...]:
    """Put the rows that need scores into rectangles; rows that see at most `index_topk` tokens need none. block_tables: [R, B].

    Spans with equally many such rows share a rectangle when their contexts, in key tiles of `tile_blocks` blocks, round up to the
    same power of two: so at most half of the keys read are padding, and 16 decode rows cost one or two kernel calls, not 16.
    """
    buckets: dict[tuple[int, int], list[RowSpan]] = {}
    for span in spans:
        first, end = max(span.start, index_topk), span.end
        if end > first:
            scored = RowSpan(span.sequence, span.row_end - (end - first), span.row_end, first)
            num_tiles = -(-end // (tile_blocks * block_size_tokens))
            buckets.setdefault((end - first, 1 << (num_tiles - 1).bit_length()), []).append(scored)
    return tuple([_rectangle(members, block_tables, block_size_tokens, tile_blocks) for members in buckets.values()])


def _rectangle(members: Sequence[RowSpan], block_tables: NDArray[np.int64], block_size_tokens: int, tile_blocks: int) -> ScoredRows:
    num_blocks = max([-(-span.end // block_size_tokens) for span in members])
    return ScoredRows(tuple(members), block_tables, num_blocks + -num_blocks % tile_blocks)
