"""Prefill context parallelism: ranks share the rows of a step, each cache is whole on every rank.

A sequence's new rows are cut into 2 W neighbouring chunks of equal length, and rank r takes chunks r and 2 W - 1 - r: an early row sees
few tokens and a late one many, so the two together cost about the same on every rank. Every layer stores the keys of its own rows, then
all ranks exchange what they stored, byte by byte as it lies in the cache, before any row attends: so a key is rounded once, by the rank
that made it, and what crosses the wire is as small as the cache's format. Source: FACTS 6.5, where keys travel before their rounding.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.parallel.collectives import Collectives
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.step_batch import RowSpan, StepBatch, group_scored_rows


class RowRange(NamedTuple):
    """Rows [start, end) of a sequence's new rows."""

    start: int
    end: int


def zigzag(num_rows: int, size: int, rank: int) -> tuple[RowRange, ...]:
    """The ranges of `num_rows` rows that rank `rank` of `size` computes, ascending, none of them empty; a short tail may leave it none."""
    width = -(-num_rows // (2 * size))
    chunks = [RowRange(min(chunk * width, num_rows), min((chunk + 1) * width, num_rows)) for chunk in (rank, 2 * size - 1 - rank)]
    return tuple(chunk for chunk in chunks if chunk.start < chunk.end)


def rows_of(spans: Sequence[RowSpan], size: int, rank: int) -> NDArray[np.int64]:
    """The numbers of the rows that a rank computes, in the step's order."""
    parts = [(span, part) for span in spans for part in zigzag(span.num_rows, size, rank)]
    runs = [np.arange(span.row_start + part.start, span.row_start + part.end) for span, part in parts]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def share_rows(batch: StepBatch, context: ParallelContext, *, index_topk: int, block_size_tokens: int, row_tile: int) -> "RowShare | None":
    """How the ranks of `context` share the step's rows; None where one rank computes them all."""
    group = context.prefill_context
    if group.size == 1:
        return None
    return RowShare(batch, group, index_topk=index_topk, block_size_tokens=block_size_tokens, row_tile=row_tile)


class RowShare:
    """How the rows of one step are shared by the ranks of a group. batch: this rank's rows as a step of their own, padded.

    A rank without rows has one of padding, so that every operation has something to do and every exchange its partner.
    """

    def __init__(self, batch: StepBatch, group: Collectives, *, index_topk: int, block_size_tokens: int, row_tile: int) -> None:
        self._group = group
        self._rows = [rows_of(batch.spans, group.size, rank) for rank in range(group.size)]
        self._width = max(len(rows) for rows in self._rows)
        self._own = torch.from_numpy(self._rows[group.rank])
        self._num_padding = -len(self._own) % row_tile if len(self._own) else row_tile
        self._places = torch.from_numpy(self._find_places(batch.num_rows))
        self._exchange_slots(batch.slots.numpy())
        self.batch = self._local(batch, index_topk, block_size_tokens)

    def take(self, x: Tensor, padding: int = 0) -> Tensor:
        """This rank's rows of [T, ...], padded as `batch` with that value."""
        return functional.pad(x.index_select(0, self._own), (0, 0) * (x.dim() - 1) + (0, self._num_padding), value=padding)

    def whole(self, x: Tensor) -> Tensor:
        """All rows, [num_rows, ...] in the step's order, new, on every rank; x: [T', ...] of this rank's, padded as `batch`."""
        gathered = self._group.all_gather(self._equal(x[: len(self._own)]))
        return gathered.flatten(0, 1).index_select(0, self._places)

    def exchange(self, regions: Sequence[CacheRegion]) -> None:
        """Give every rank the keys of this step's rows as they lie in the cache. regions: in which each rank has stored its own rows'."""
        if not self._num_stored:
            return
        stored = torch.cat([_read(region, self._own_slots) for region in regions], dim=1)
        padding = self._num_stored - stored.shape[0]
        gathered = self._group.all_gather(functional.pad(stored, (0, 0, 0, padding)).contiguous()).flatten(0, 1)
        foreign = gathered.index_select(0, self._foreign_places)
        widths = [sum(region.row_format.plane_bytes) for region in regions]
        for region, rows in zip(regions, foreign.split(widths, dim=1), strict=True):
            _write(region, self._foreign_slots, rows)

    def _find_places(self, num_rows: int) -> NDArray[np.int64]:
        places = np.empty(num_rows, dtype=np.int64)
        for rank, rows in enumerate(self._rows):
            places[rows] = rank * self._width + np.arange(len(rows))
        return places

    def _exchange_slots(self, slots: NDArray[np.int64]) -> None:
        """Which rows are stored at all, where, and where a gathered exchange has them."""
        stored = [slots[rows][slots[rows] >= 0] for rows in self._rows]
        self._num_stored = max(len(each) for each in stored)
        others = [rank for rank in range(self._group.size) if rank != self._group.rank and len(stored[rank])]
        places = [rank * self._num_stored + np.arange(len(stored[rank])) for rank in others]
        self._own_slots = torch.from_numpy(stored[self._group.rank])
        self._foreign_slots = torch.from_numpy(np.concatenate([stored[rank] for rank in others])) if others else self._own_slots[:0]
        self._foreign_places = torch.from_numpy(np.concatenate(places)) if places else self._own_slots[:0]

    def _equal(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, self._width - x.shape[0])).contiguous()

    def _local(self, batch: StepBatch, index_topk: int, block_size_tokens: int) -> StepBatch:
        spans = tuple(_local_spans(batch.spans, self._group.size, self._group.rank))
        return StepBatch(
            tokens=self.take(batch.tokens),
            positions=self.take(batch.positions),
            slots=self.take(batch.slots, -1),
            row_sequences=self.take(batch.row_sequences),
            visible=self.take(batch.visible),
            block_tables=batch.block_tables,
            spans=spans,
            scored=group_scored_rows(
                spans,
                batch.block_tables.numpy(),
                index_topk=index_topk,
                block_size_tokens=block_size_tokens,
                tile_blocks=KEY_TILE_TOKENS // block_size_tokens,
            ),
            num_rows=len(self._own),
            max_visible=batch.max_visible,
            key_exchange=self,
        )


def _local_spans(spans: Sequence[RowSpan], size: int, rank: int) -> Iterator[RowSpan]:
    row = 0
    for span in spans:
        for part in zigzag(span.num_rows, size, rank):
            end = row + part.end - part.start
            yield RowSpan(span.sequence, row, end, span.start + part.start)
            row = end


def _read(region: CacheRegion, slots: Tensor) -> Tensor:
    """[n, bytes of a row] uint8: the rows at `slots` as they are stored, plane by plane."""
    blocks, offsets = _split(region, slots)
    return torch.cat([plane[blocks, offsets].view(torch.uint8) for plane in region.planes], dim=1)


def _write(region: CacheRegion, slots: Tensor, rows: Tensor) -> None:
    """Inverse of `_read`, into this rank's region."""
    pieces = rows.split(list(region.row_format.plane_bytes), dim=1)
    region.put(slots, [piece.contiguous().view(plane.dtype) for piece, plane in zip(pieces, region.planes, strict=True)])


def _split(region: CacheRegion, slots: Tensor) -> tuple[Tensor, Tensor]:
    blocks = torch.div(slots, region.block_size_tokens, rounding_mode="floor")
    return blocks, slots - blocks * region.block_size_tokens
