"""Index groups: consecutive layers that attend to one list of tokens.

The first layer of a group owns an indexer and makes the logical list; it is turned into cache addresses once, and every layer of
the group reads those. GLM-5.3: 78 layers, 21 groups {0}, {1}, {2-5}, {6-9} ... {74-77}; its MTP layer is a group of its own.

When one conversion may serve a whole group: addresses point into the pool's own rows and nowhere else. Other runtimes allow it for
decode-only batches, because their prefill gathers keys into a workspace whose offsets come from another table. Here no kernel reads a
workspace by address (expanded attention, which has one, takes the logical lists), so a group converts once for any batch. What it rests
on is asserted: all layers of a group read the same tables with the same block size and strides, and nobody writes the lists between the
layer that makes them and the last one that reads them (`Selection.check`). Buffers belong to one group each: no group waits for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.topk_to_slots import topk_to_slots
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import StepBatch
from kv_transfer.errors import ConfigError

_SMALLEST_BUFFER_ROWS = 16
"""A decode step of a laptop. Buffers double from here, up to the step limit."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an address depends on: tokens a block, and the steps of a block and of a token in rows of `CacheRegion.rows`."""

    block_size_tokens: int
    block_units: int
    token_units: int
    unit: int

    @classmethod
    def of(cls, region: CacheRegion) -> "Geometry":
        """The geometry of a region."""
        blocks = region.planes[0]
        return cls(region.block_size_tokens, blocks.stride(0) // region.unit, blocks.stride(1) // region.unit, region.unit)


@dataclass(frozen=True, slots=True)
class Selection:
    """What one group attends to in one step, made by its leader. Views of the group's buffers: valid until its next `open`.

    lists: [T, W] int64, ascending token positions, -1 after the last. addresses: [T, W] int64, the same as rows of
    `CacheRegion.rows`. counts: [T] int64, entries of a row that are not -1.
    """

    group: "IndexGroup"
    lists: Tensor
    addresses: Tensor
    counts: Tensor
    block_tables: Tensor
    geometry: Geometry
    generation: int

    def check(self, layer: int, batch: StepBatch, region: CacheRegion) -> None:
        """Assert what reading these addresses in `layer` rests on. Every consumer calls it, the leader included."""
        assert layer in self.group.layers, f"layer {layer} is not of the group {self.group.layers}"
        assert self.generation == self.group.generation, f"the lists of group {self.group.layers} were written again before layer {layer}"
        assert batch.block_tables is self.block_tables, f"layer {layer} reads other block tables than its group's leader"
        geometry = Geometry.of(region)
        assert geometry == self.geometry, f"layer {layer} has {geometry}, its group's leader {self.geometry}"


class IndexGroup:
    """Layers `layers`, in order; `layers[0]` owns the indexer. Holds the buffers of one step, never two.

    topk: widest list. max_rows: most rows of a step, the size to which buffers grow; a larger step gets buffers of its own, which are
    not kept. generation counts the writes of the logical lists, num_conversions those to addresses. Used by one thread.
    """

    def __init__(self, layers: Sequence[int], topk: int, max_rows: int | None = None) -> None:
        assert layers, "a group has a first layer"
        self.layers = tuple(layers)
        self.topk = topk
        self.max_rows = max_rows
        self.generation = 0
        self.num_conversions = 0
        self._rows = 0
        self._lists = self._addresses = self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def leader(self) -> int:
        """The layer that owns the indexer."""
        return self.layers[0]

    def check_regions(self, regions: Sequence[CacheRegion]) -> None:
        """Assert that the group's layers have one geometry in a pool. regions: of the group's layers, in order."""
        geometries = [Geometry.of(region) for region in regions]
        assert len(set(geometries)) == 1, f"the layers of group {self.layers} have other geometries: {geometries}"

    def open(self, num_rows: int, width: int) -> Tensor:
        """The logical lists of a new step, [num_rows, width], to be written at once; their contents are what the last step left."""
        assert 0 < width <= self.topk, f"a list of {width} tokens; the widest has {self.topk}"
        self._reserve(num_rows)
        self.generation += 1
        return self._lists[: num_rows * width].view(num_rows, width)

    def convert(self, lists: Tensor, batch: StepBatch, region: CacheRegion, impl: Impl | None = None) -> Selection:
        """Turn the lists that `open` gave into addresses, once for all layers of the group. region: of the group's leader."""
        assert lists.data_ptr() == self._lists.data_ptr() or lists.numel() == 0, "these lists are not the group's own"
        addresses = self._addresses[: lists.numel()].view(lists.shape)
        counts = self._counts[: lists.shape[0]]
        topk_to_slots(lists, batch.row_sequences, batch.block_tables, region, addresses=addresses, counts=counts, impl=impl)
        self.num_conversions += 1
        return Selection(self, lists, addresses, counts, batch.block_tables, Geometry.of(region), self.generation)

    def compact(self, lists: Tensor, rows: Tensor, batch: StepBatch, region: CacheRegion, impl: Impl | None = None) -> Selection:
        """Keep the lists of `rows` and convert them for `batch`, which has one row for each: what MTP drafts after the first reuse.

        lists: those of the group's last selection; rows: [T'] int64, the last *accepted* row of each request, in the order of `batch`. The
        lists end where they did: drafts do not see the positions that were drafted since. Source: FACTS 3.10.
        """
        kept = lists.index_select(0, rows)
        assert kept.shape[0] == batch.tokens.shape[0], f"{kept.shape[0]} lists for a step of {batch.tokens.shape[0]} rows"
        compacted = self.open(*kept.shape)
        compacted.copy_(kept)
        return self.convert(compacted, batch, region, impl)

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._rows:
            return
        doubled = max(_SMALLEST_BUFFER_ROWS, 1 << (num_rows - 1).bit_length())
        rows = max(num_rows, doubled if self.max_rows is None else min(doubled, self.max_rows))
        self._lists = torch.empty(rows * self.topk, dtype=torch.int64)
        self._addresses = torch.empty(rows * self.topk, dtype=torch.int64)
        self._counts = torch.empty(rows, dtype=torch.int64)
        self._rows = rows if self.max_rows is None or rows <= self.max_rows else 0  # 0: not kept


def form_groups(layers: Sequence[int], owns_indexer: Callable[[int], bool]) -> tuple[tuple[int, ...], ...]:
    """Cut layers into groups: one starts at each layer that owns an indexer, and every layer is in exactly one.

    Raises ConfigError naming the field when the first layer has no indexer: it would read a list that nobody made.
    """
    groups: list[list[int]] = []
    for layer in layers:
        if owns_indexer(layer):
            groups.append([])
        elif not groups:
            raise ConfigError(f"layer {layer} shares a list, but no layer before it makes one", path="indexer_types")
        groups[-1].append(layer)
    return tuple(tuple(group) for group in groups)


def build_index_groups(config: GlmConfig, max_step_tokens: int | None = None) -> tuple[IndexGroup, ...]:
    """The groups of the target model. max_step_tokens: the size to which their buffers grow; None sets no bound.

    Raises ConfigError as `form_groups`.
    """
    layers = form_groups(range(config.num_hidden_layers), config.is_indexing_layer)
    return tuple(IndexGroup(group, config.index_topk, max_step_tokens) for group in layers)


def build_mtp_groups(config: GlmConfig, max_step_tokens: int | None = None) -> tuple[IndexGroup, ...]:
    """The groups of the MTP layers: each owns an indexer, hence one group each; they never read the target's lists. As above."""
    layers = form_groups(config.mtp_layers, config.mtp_layers.__contains__)
    return tuple(IndexGroup(group, config.index_topk, max_step_tokens) for group in layers)
