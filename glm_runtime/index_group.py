"""Index groups: consecutive layers that attend to one list of tokens.

The first layer of a group owns an indexer and makes the logical list; it is turned into cache addresses once, and every layer of
the group reads those. GLM-5.3: 78 layers, 21 groups {0}, {1}, {2-5}, {6-9} ... {74-77}.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class IndexGroup:
    """Layers `layers`, in order; `layers[0]` owns the indexer."""

    layers: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.layers[0]


@dataclass(frozen=True, slots=True)
class Selection:
    """What one group attends to in one step, made by its leader.

    lists: [T, K] int64, ascending token positions, -1 after the last. addresses: [T, K] int64, the same as rows of
    `CacheRegion.rows`; valid for every layer of the group, because all MLA regions of a pool share stride and row width.
    """

    lists: Tensor
    addresses: Tensor


def build_index_groups(config: GlmConfig) -> tuple[IndexGroup, ...]:
    """Cut the layers into groups: a group starts at each layer that owns an indexer. Every layer is in exactly one group."""
    return tuple(IndexGroup(layers) for layers in config.index_groups)


def make_selection(lists: Tensor, batch: StepBatch, region: CacheRegion) -> Selection:
    """Turn logical lists into cache addresses, once per group: slot = block_table[sequence, t div 64] * 64 + t mod 64."""
    size = region.block_size_tokens
    tokens = lists.clamp_min(0)
    block_index = torch.div(tokens, size, rounding_mode="floor")
    table_starts = batch.row_sequences[:, None] * batch.block_tables.shape[1]
    slots = batch.block_tables.take(table_starts + block_index) * size + (tokens - block_index * size)
    return Selection(lists, region.addresses(torch.where(lists < 0, -1, slots)))


def list_all_visible(batch: StepBatch, width: int) -> Tensor:
    """Lists for rows that need no scores: [T, width] int64, every token a row sees if it sees at most `width`, else -1."""
    tokens = torch.arange(width)
    is_listed = (tokens < batch.visible[:, None]) & (batch.visible[:, None] <= width)
    return torch.where(is_listed, tokens, -1)
