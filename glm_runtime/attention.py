"""Multi-head latent attention, in its two equal forms side by side.

Expanded: keys and values are rebuilt from the latents, [k | v] = c W_kv; cheap when many rows share one short context.
Absorbed: W_k moves into the query and W_v behind the sum, so that attention runs on the cached rows as they are; it needs no
expansion, works on any list of rows, and is the only form in deterministic mode, because a row must not see which form its step took.

Legend: `T` rows, `H` heads, `N` nope dim, `R` rope dim, `C` latent rank, `V` value head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.cache_layout import INDEX_K, MLA_KV
from glm_runtime.config import GlmConfig
from glm_runtime.index_group import IndexGroup, Selection, make_selection
from glm_runtime.indexer import Indexer
from glm_runtime.numerics import Numerics
from glm_runtime.ops.cache_rows import load_blocks
from glm_runtime.ops.dense_mla import dense_mla
from glm_runtime.ops.fused_norm_rope import LatentNorms, fused_norm_rope
from glm_runtime.ops.sparse_mla import sparse_mla
from glm_runtime.packed_matrix import plain_heads
from glm_runtime.paged_cache import CacheRegion, PagedCache
from glm_runtime.rope import rotate_interleaved
from glm_runtime.step_batch import RowSpan, StepBatch
from glm_runtime.weights import AttentionWeights


@dataclass(frozen=True, kw_only=True, slots=True)
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

        hidden: [T, hidden], normalised. rope: cos and sin at the rows' positions. selection: the group's; None lets its leader choose.
        forced_lists: [T, K] tokens to attend to instead of the indexer's choice; -1 in a row's first column leaves that row alone.
        Returns [T, hidden] and the group's selection.
        """
        gemm, (cos, sin) = self.numerics.gemm, rope
        mla = cache.region(self.mla_component, self.layer)
        projected = gemm.linear(hidden, self.weights.projections)  # [T, Q + C + R]
        norms = LatentNorms(self.weights.q_norm, self.weights.kv_norm, self.config.rms_norm_eps)
        query_latent = fused_norm_rope(projected, norms, cos, sin, batch.slots, mla)  # [T, Q]
        if selection is None:
            assert self.indexer is not None, "the leader of a group runs before its followers"
            lists = self._choose(self.indexer, hidden, query_latent, rope, batch, cache)
            if forced_lists is not None:
                lists = torch.where(forced_lists[:, :1] >= 0, forced_lists, lists)
            selection = make_selection(lists, batch, mla)

        heads = gemm.linear(query_latent, self.weights.q_b).view(-1, self.config.num_attention_heads, self.config.qk_head_dim)
        nope, rotary = heads.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)  # type: ignore[no-untyped-call]
        rotary = rotate_interleaved(rotary, cos[:, None], sin[:, None])
        attended = self._attend(nope, rotary, batch, mla, selection)  # [T, H, V]
        return gemm.linear(attended.flatten(1), self.weights.output), selection

    def _choose(
        self, indexer: Indexer, hidden: Tensor, query_latent: Tensor, rope: tuple[Tensor, Tensor], batch: StepBatch, cache: PagedCache
    ) -> Tensor:
        region = cache.region(self.index_component, self.layer)
        raw_keys, head_weights = indexer.project(hidden)
        indexer.store_keys(raw_keys, *rope, batch, region)
        return indexer.select(indexer.queries(query_latent, *rope), head_weights, batch, region)

    def _attend(self, nope: Tensor, rotary: Tensor, batch: StepBatch, mla: CacheRegion, selection: Selection) -> Tensor:
        dense = [span for span in batch.spans if self.is_dense(span)]
        if not dense:
            return self.absorbed(nope, rotary, mla, selection.addresses)
        is_sparse = torch.ones(nope.shape[0], dtype=torch.bool)
        attended = nope.new_empty(*nope.shape[:2], self.config.v_head_dim)
        for span in dense:
            rows = slice(span.row_start, span.row_end)
            is_sparse[rows] = False
            attended[rows] = self.expanded(nope[rows], rotary[rows], batch.block_tables[span.sequence], span, mla)
        if is_sparse.any():
            attended[is_sparse] = self.absorbed(nope[is_sparse], rotary[is_sparse], mla, selection.addresses[is_sparse])
        return attended

    def is_dense(self, span: RowSpan) -> bool:
        """Whether a prefill chunk attends to its whole context in expanded form."""
        return not self.numerics.is_deterministic and span.num_rows > 1 and span.end <= self.config.index_topk

    def absorbed(self, nope: Tensor, rotary: Tensor, mla: CacheRegion, addresses: Tensor) -> Tensor:
        """o_h = (sum_s p_s c_s) W_v,h with p = softmax((q_h W_k,h . c_s + rotary_h . kpe_s) / sqrt(N + R)).

        nope: [T, H, N]; rotary: [T, H, R]; addresses: [T, W]. Returns [T, H, V].
        """
        gemm = self.numerics.gemm
        absorbed = gemm.heads(nope, self.weights.key_up)  # [T, H, C]
        queries = torch.cat((absorbed, rotary), dim=-1)  # [T, H, C + R]
        latents, _ = sparse_mla(
            queries,
            mla,
            addresses,
            latent_dim=self.config.kv_lora_rank,
            scale=self.config.qk_head_dim**-0.5,
            scratch_bytes=self.numerics.scratch_bytes,
        )
        return gemm.heads(latents.to(nope.dtype), self.weights.value_up)  # [T, H, V]

    def expanded(self, nope: Tensor, rotary: Tensor, block_table: Tensor, span: RowSpan, mla: CacheRegion) -> Tensor:
        """o_h = sum_s p_s v_s,h with [k_s,h | v_s,h] = [W_k,h c_s | c_s W_v,h] and p over all s up to the row.

        nope: [t, H, N], rotary: [t, H, R] of one span; block_table: [B]. Returns [t, H, V].
        """
        num_blocks = -(-span.end // mla.block_size_tokens)
        context = load_blocks(mla, block_table[:num_blocks])[0][: span.end].to(nope.dtype)
        latents, shared_key = context[:, : self.config.kv_lora_rank], context[:, self.config.kv_lora_rank :]
        keys = torch.einsum("sc,hnc->shn", latents, plain_heads(self.weights.key_up).to(nope.dtype))
        values = torch.einsum("sc,hcv->shv", latents, plain_heads(self.weights.value_up).to(nope.dtype))
        num_heads = self.config.num_attention_heads
        return dense_mla(
            torch.cat((nope, rotary), dim=-1),
            torch.cat((keys, shared_key[:, None].expand(-1, num_heads, -1)), dim=-1),
            values,
            start=span.start,
            scale=self.config.qk_head_dim**-0.5,
            scratch_bytes=self.numerics.scratch_bytes,
        ).to(nope.dtype)
