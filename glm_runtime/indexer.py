"""The lightning indexer: scores every visible token for every row and keeps the best `index_topk`.

Interleaved RoPE on the *first* R dims of queries and keys (MLA rotates its last), ReLU before the signed head weights, and a
deterministic top-k. Shared layers have no indexer and no index keys.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.numerics import Numerics
from glm_runtime.ops.fused_norm_rope import IndexKeyNorm, IndexKeys
from glm_runtime.ops.fused_q import index_queries
from glm_runtime.ops.index_select import index_select
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.decode_context import BlockShare
from glm_runtime.parallel.decode_exchange import merge_best
from glm_runtime.step_batch import StepBatch
from glm_runtime.weights import IndexerWeights

KEY_NORM_EPS = 1e-6
"""LayerNorm's eps in the checkpoint's modelling code; not rms_norm_eps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """One layer's indexer. `scratch_bytes` bounds the scores held at a time."""

    config: GlmConfig
    weights: IndexerWeights
    numerics: Numerics
    scratch_bytes: int = 32 << 20
    context: ParallelContext = field(default_factory=one_rank)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Raw keys and head weights from one product: [T, D] and [T, H] fp32, the latter scaled by H^-1/2 D^-1/2.

        hidden: [T, hidden], the layer's normalised input.
        """
        width, num_heads = self.config.index_head_dim, self.config.index_n_heads
        projected = self.numerics.gemm.linear(hidden, self.weights.key_and_weights)
        return projected[:, :width], projected[:, width:].float() * (num_heads**-0.5 * width**-0.5)

    def keys(self, raw_keys: Tensor, region: CacheRegion) -> IndexKeys:
        """What stores this step's index keys; done for every row, scored or not, because later rows will score them."""
        return IndexKeys(raw_keys, IndexKeyNorm(self.weights.k_norm_weight, self.weights.k_norm_bias, KEY_NORM_EPS), region)

    def queries(self, query_latent: Tensor, head_weights: Tensor, cos: Tensor, sin: Tensor, region: CacheRegion) -> tuple[Tensor, Tensor]:
        """Rotated queries [T, H, D] from the *normalised* query latent [T, Q], and their head weights [T, H].

        Beside packed keys queries are rounded like keys, and the weights carry the queries' FP8 scales.
        """
        flat = self.numerics.gemm.linear(query_latent, self.weights.queries)
        heads = flat.view(flat.shape[0], self.config.index_n_heads, self.config.index_head_dim)
        return index_queries(heads, head_weights, cos, sin, region.row_format, impl=self.numerics.impl)

    def list_width(self, batch: StepBatch) -> int:
        """How wide this step's lists are: index_topk, or in fast mode no more than the step needs."""
        topk = self.config.index_topk
        return topk if self.numerics.is_deterministic else min(topk, batch.max_visible)

    def select(
        self,
        query_latent: Tensor,
        head_weights: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: StepBatch,
        region: CacheRegion,
        lists: Tensor,
    ) -> None:
        """Write the tokens that each row attends to: lists [T, W] int64, ascending, -1 after the last.

        The step's own keys must be stored. Rows that see at most index_topk tokens get all of them, without scores; a step of only such
        rows does not even make queries.
        """
        if not batch.scored:
            list_all_visible(batch, lists)
            return
        queries, weights = self.queries(query_latent, head_weights, *rope, region)
        self.choose(queries, weights, batch, region, lists)

    def choose(self, queries: Tensor, weights: Tensor, batch: StepBatch, region: CacheRegion, lists: Tensor) -> None:
        """Score and select; arguments as `select` made them.

        Where ranks share a cache, each scores its own tokens for the rows that need scores, and all merge what they found: one exchange,
        after which all have the same lists.
        """
        if self.context.decode_context.size == 1:
            self._select(queries, weights, region, batch, lists)
            return
        list_all_visible(batch, lists)
        share = batch.share
        assert share is not None, "a step with rows to score has this rank's share of them"
        own = lists.new_empty(share.rows.shape[0], lists.shape[1])
        scores = torch.empty(own.shape)
        self._select(queries[share.rows], weights[share.rows], region, share.batch, own, scores)
        group = self.context.decode_context
        tokens = BlockShare(group.rank, group.size, region.block_size_tokens).global_tokens(own)
        lists[share.rows] = merge_best(scores, tokens, group, self.numerics.impl)

    def _select(
        self, queries: Tensor, weights: Tensor, region: CacheRegion, batch: StepBatch, lists: Tensor, scores: Tensor | None = None
    ) -> None:
        index_select(
            queries,
            weights,
            region,
            batch,
            self.config.index_topk,
            lists=lists,
            scores=scores,
            gemm=self.numerics.gemm,
            scratch_bytes=self.scratch_bytes,
            impl=self.numerics.impl,
        )


def list_all_visible(batch: StepBatch, lists: Tensor) -> None:
    """Write lists without scores: [T, W] int64, every token a row sees, then -1. A row that sees more than W lists the first W."""
    tokens = torch.arange(lists.shape[1])
    lists.copy_(torch.where(tokens < batch.visible[:, None], tokens, -1))
