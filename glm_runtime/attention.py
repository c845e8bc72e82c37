"""Multi-head latent attention, in its two equal forms side by side.

Expanded: keys and values are rebuilt from the latents, [k | v] = c W_kv; cheap when many rows share one context. Beyond index_topk tokens
the selection becomes a mask.
Absorbed: W_k moves into the query and W_v behind the sum, so that attention runs on the cached rows as they are; it needs no
expansion, works on any list of rows, and is the only form in deterministic mode, because a row must not see which form its step took.
Where ranks share a cache, each attends to its own rows of it, absorbed, for the heads of all of them; what comes out is put together.

Legend: `T` rows, `H` heads, `N` nope dim, `R` rope dim, `C` latent rank, `V` value head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from glm_runtime.cache_layout import INDEX_K, MLA_KV
from glm_runtime.config import GlmConfig
from glm_runtime.index_group import IndexGroup, Selection
from glm_runtime.indexer import Indexer
from glm_runtime.numerics import Numerics
from glm_runtime.ops.cache_rows import load_sequence
from glm_runtime.ops.dense_mla import dense_mla
from glm_runtime.ops.fused_norm_rope import LatentNorms, fused_norm_rope
from glm_runtime.ops.fused_q import fused_q
from glm_runtime.ops.sparse_mla import sparse_mla
from glm_runtime.packed_matrix import Operand, pack, plain_heads
from glm_runtime.paged_cache import CacheRegion, PagedCache
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.decode_exchange import ShardOutputs, gather_heads
from glm_runtime.rope import rotate_interleaved
from glm_runtime.step_batch import RowSpan, StepBatch, exchange_keys
from glm_runtime.weights import AttentionWeights

ABSORBED_MAX_BYTES = 16 << 20
"""Most memory for the latents [T, H, C] of rows that attend together in absorbed form: fresh pages cost more than a second call."""

EXPANDED_MAX_BYTES = 256 << 20
"""Most memory for the rebuilt keys and values of one context; beyond it the absorbed form serves."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer's attention. `indexer` is None where the layer shares the list of its group's leader.

    mla_component, index_component: which components of the cache hold the layer's keys.
    """

    config: GlmConfig
    layer: int
    group: IndexGroup
    weights: AttentionWeights
    indexer: Indexer | None
    numerics: Numerics
    mla_component: str = MLA_KV
    index_component: str = INDEX_K
    context: ParallelContext = field(default_factory=one_rank)

    def __post_init__(self) -> None:
        assert (self.indexer is not None) == (self.layer == self.group.leader), "only a group's first layer owns an indexer"

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: PagedCache,
        selection: Selection | None,
        forced_lists: Tensor | None = None,
    ) -> tuple[Tensor, Selection]:
        """Store this step's keys, then attend to the cache as stored.

        hidden: [T, hidden], normalised. rope: cos and sin at the rows' positions. selection: the group's; None for its leader, which then
        makes it (and stores index keys). forced_lists: [T, K] tokens to attend to instead of the indexer's choice; -1 in a row's first
        column leaves that row alone. Returns [T, hidden] and the group's selection.
        """
        gemm, mla = self.numerics.gemm, cache.region(self.mla_component, self.layer)
        projected = gemm.linear(hidden, self.weights.projections)  # [T, Q + C + R]
        norms = LatentNorms(self.weights.q_norm, self.weights.kv_norm, self.config.rms_norm_eps)
        if selection is not None:
            query_latent = fused_norm_rope(projected, norms, *rope, batch.slots, mla, impl=self.numerics.impl)  # [T, Q]
            exchange_keys(batch, [mla])
        else:
            assert self.indexer is not None, "the leader of a group runs before its followers"
            index_region = cache.region(self.index_component, self.layer)
            raw_keys, head_weights = self.indexer.project(hidden)
            index_keys = self.indexer.keys(raw_keys, index_region)
            query_latent = fused_norm_rope(projected, norms, *rope, batch.slots, mla, index=index_keys, impl=self.numerics.impl)
            exchange_keys(batch, [mla, index_region])
            lists = self.group.open(hidden.shape[0], self.indexer.list_width(batch))
            self.indexer.select(query_latent, head_weights, rope, batch, index_region, lists)
            if forced_lists is not None:
                lists.copy_(torch.where(forced_lists[:, :1] >= 0, forced_lists, lists))
            selection = self.group.convert(lists, batch, mla, self.numerics.impl)
        selection.check(self.layer, batch, mla)
        heads = gemm.linear(query_latent, self.weights.q_b).view(hidden.shape[0], -1, self.config.qk_head_dim)
        attended = self._attend(heads, rope, batch, mla, selection)  # [T, H, V]
        return gemm.linear(attended.flatten(1), self.weights.output), selection

    def _attend(self, heads: Tensor, rope: tuple[Tensor, Tensor], batch: StepBatch, mla: CacheRegion, selection: Selection) -> Tensor:
        """[T, H, V]: runs of rows in one form or the other."""
        if self.context.decode_context.size > 1:
            return self.across_ranks(heads, rope, mla, selection.addresses)
        is_decode = batch.num_rows == len(batch.spans)
        expanded = [] if is_decode else [span for span in batch.spans if self.is_expanded(span)]
        if not expanded:
            return self.absorbed(heads, rope, mla, selection.addresses)
        attended = heads.new_empty(*heads.shape[:2], self.config.v_head_dim)
        first = 0
        for span in (*expanded, None):
            last = heads.shape[0] if span is None else span.row_start
            if first < last:
                rows = slice(first, last)
                attended[rows] = self.absorbed(heads[rows], _at(rope, rows), mla, selection.addresses[rows])
            if span is not None:
                rows = slice(span.row_start, span.row_end)
                lists = None if span.end <= self.config.index_topk else selection.lists[rows]
                table = batch.block_tables[span.sequence]
                attended[rows] = self.expanded(heads[rows], _at(rope, rows), table, span, mla, lists)
                first = span.row_end
        return attended

    def is_expanded(self, span: RowSpan) -> bool:
        """Whether a prefill chunk attends in expanded form: in fast mode, where it is less work and its memory is bounded."""
        if self.numerics.is_deterministic or span.num_rows == 1:
            return False
        num_heads = self.weights.value_up.shape[0]
        rebuilt_numbers = span.end * num_heads * (self.config.qk_nope_head_dim + self.config.v_head_dim)
        return rebuilt_numbers * self.numerics.dtype.itemsize <= EXPANDED_MAX_BYTES and is_expanding_cheaper(self.config, span)

    def absorbed(self, heads: Tensor, rope: tuple[Tensor, Tensor], mla: CacheRegion, addresses: Tensor) -> Tensor:
        """o_h = (sum_s p_s c_s) W_v,h with p = softmax((q_h W_k,h . c_s + rotary_h . kpe_s) / sqrt(N + R)).

        heads: [T, H, N + R], not yet rotated; addresses: [T, W]. Returns [T, H, V].
        Rounds: queries after W_k to heads' dtype, the latents before W_v to it; in fast mode the compiled kernel multiplies bf16 numbers.
        """
        pieces = [self._absorbed(heads[rows], _at(rope, rows), mla, addresses[rows]) for rows in self._pieces(*heads.shape[:2])]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _absorbed(self, heads: Tensor, rope: tuple[Tensor, Tensor], mla: CacheRegion, addresses: Tensor) -> Tensor:
        latents, _ = self._latents(self._queries(heads, rope), mla, addresses)
        return self.numerics.gemm.heads(latents.to(heads.dtype), self.weights.value_up)  # [T, H, V]

    def across_ranks(self, heads: Tensor, rope: tuple[Tensor, Tensor], mla: CacheRegion, addresses: Tensor) -> Tensor:
        """As `absorbed`, where each rank of the decode context group has the addresses of its own tokens: one softmax over all of them.

        heads: of all ranks of the group, or this rank's own, which are then gathered. Returns [T, H, V] of this rank's own heads.
        Rounds: as `absorbed`, and what `ShardOutputs` sends.
        """
        group, layout = self.context.decode_context, self.context.layout
        queries = self._queries(heads, rope)
        if not layout.replicates_queries:
            queries = gather_heads(queries, group)
        outputs = ShardOutputs(queries.shape[0], queries.shape[1], self.config.kv_lora_rank, queries.dtype, group.size)
        for rows in self._pieces(*queries.shape[:2]):
            outputs.put(rows, *self._latents(queries[rows], mla, addresses[rows]))
        join = outputs.swap if layout.dcp_combine == "a2a" else outputs.scatter
        return self.numerics.gemm.heads(join(group, self.numerics.impl).to(heads.dtype), self.weights.value_up)

    def _pieces(self, num_rows: int, num_heads: int) -> Iterator[slice]:
        """Rows that attend together in absorbed form; one piece, perhaps empty, at least."""
        step = max(1, ABSORBED_MAX_BYTES // (num_heads * self.config.kv_lora_rank * 4))
        return (slice(first, min(first + step, num_rows)) for first in range(0, max(num_rows, 1), step))

    def _queries(self, heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[T, H, C + R]: absorbed and rotated."""
        absorbed = self.numerics.gemm.heads(heads[..., : self.config.qk_nope_head_dim], self.weights.key_up)  # [T, H, C]
        return fused_q(heads, absorbed, *rope, impl=self.numerics.impl)

    def _latents(self, queries: Tensor, mla: CacheRegion, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of latents [T, H, C] and their log-sums [T, H], fp32."""
        return sparse_mla(
            queries,
            mla,
            addresses,
            latent_dim=self.config.kv_lora_rank,
            scale=self.config.qk_head_dim**-0.5,
            scratch_bytes=self.numerics.scratch_bytes,
            uses_bf16=queries.dtype == torch.bfloat16,
            impl=self.numerics.impl,
        )

    def expanded(
        self, heads: Tensor, rope: tuple[Tensor, Tensor], block_table: Tensor, span: RowSpan, mla: CacheRegion, lists: Tensor | None
    ) -> Tensor:
        """o_h = sum_s p_s v_s,h with [k_s,h | v_s,h] = c_s [W_k,h | W_v,h] and p over all s up to the row, or over its list.

        heads: [t, H, N + R] of one span; block_table: [B]; lists: [t, K] or None. Returns [t, H, V].
        Rounds: cached rows, keys and values to heads' dtype.
        """
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        num_blocks = -(-span.end // mla.block_size_tokens)
        context = load_sequence(mla, block_table[:num_blocks], span.end, heads.dtype, impl=self.numerics.impl)
        rebuilt = self.numerics.gemm.linear(context[:, :latent], self.expansion).view(span.end, heads.shape[1], -1)  # [S, H, N + V]
        rotary = rotate_interleaved(heads[..., nope:], rope[0][:, None], rope[1][:, None])
        return dense_mla(
            torch.cat((heads[..., :nope], rotary), dim=-1),
            rebuilt,
            context[:, latent:],
            lists,
            start=span.start,
            scale=self.config.qk_head_dim**-0.5,
            scratch_bytes=self.numerics.scratch_bytes,
            impl=self.numerics.impl,
        )

    @cached_property
    def expansion(self) -> Operand:
        """[H * (N + V), C]: W_k and W_v by head as one operand of `linear`. Made when it is first used; deterministic mode never does."""
        by_head = torch.cat((plain_heads(self.weights.key_up), plain_heads(self.weights.value_up).transpose(1, 2)), dim=1).flatten(0, 1)
        return by_head if isinstance(self.weights.key_up, Tensor) else pack(by_head)


def _at(rope: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    return rope[0][rows], rope[1][rows]


def is_expanding_cheaper(config: GlmConfig, span: RowSpan) -> bool:
    """Whether the expanded form takes fewer multiplications for these rows; both forms were measured to run at the same rate.

    Expanded: W_kv on every token of the context, then N + R + V for each (row, earlier token). Absorbed: W_k and W_v on every row, then
    2 C + R for each (row, listed token). Whole prompts expand up to about 3.5 index_topk tokens, later chunks less far.
    """
    per_head = (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    earlier = span.end - span.num_rows // 2
    expanded = span.end * per_head + span.num_rows * earlier * (config.qk_head_dim + config.v_head_dim)
    listed = min(earlier, config.index_topk)
    absorbed = span.num_rows * per_head + span.num_rows * listed * (config.kv_lora_rank + config.latent_dim)
    return expanded < absorbed
