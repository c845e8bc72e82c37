"""The lightning indexer: scores every visible token for every row and keeps the best `index_topk`.

Interleaved RoPE on the *first* R dims of queries and keys (MLA rotates its last), ReLU before the signed head weights, and a
deterministic top-k. Shared layers have no indexer and no index keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.index_group import list_all_visible
from glm_runtime.numerics import Numerics
from glm_runtime.ops.cache_rows import round_queries
from glm_runtime.ops.fused_norm_rope import IndexKeyNorm, store_index_keys
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS, index_logits
from glm_runtime.ops.select_topk import select_topk
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.rope import rotate_interleaved
from glm_runtime.step_batch import ScoredRows, StepBatch
from glm_runtime.weights import IndexerWeights

KEY_NORM_EPS = 1e-6
"""LayerNorm's eps in the checkpoint's modelling code; not rms_norm_eps."""

_SCORE_BYTES_PER_ELEMENT = 24
"""fp32 score, int32 rank, int64 key and its top-k copy, per row and token: what the budget must hold."""

_ROWS_AT_ONCE = 256
"""Rows of a long chunk that are scored together read only the tiles of keys up to the last of them, not up to the chunk's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """One layer's indexer. `scratch_bytes` bounds the scores held at a time."""

    config: GlmConfig
    weights: IndexerWeights
    numerics: Numerics
    scratch_bytes: int = 32 << 20

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Raw keys and head weights from one product: [T, D] and [T, H] fp32, the latter scaled by H^-1/2 D^-1/2.

        hidden: [T, hidden], the layer's normalised input.
        """
        width, num_heads = self.config.index_head_dim, self.config.index_n_heads
        projected = self.numerics.gemm.linear(hidden, self.weights.key_and_weights)
        return projected[:, :width], projected[:, width:].float() * (num_heads**-0.5 * width**-0.5)

    def store_keys(self, raw_keys: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, region: CacheRegion) -> None:
        """Write this step's index keys; done for every row, scored or not, because later rows will score them."""
        norm = IndexKeyNorm(self.weights.k_norm_weight, self.weights.k_norm_bias, KEY_NORM_EPS)
        store_index_keys(raw_keys, norm, cos, sin, batch.slots, region)

    def queries(self, query_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, H, D] from the *normalised* query latent [T, Q]."""
        flat = self.numerics.gemm.linear(query_latent, self.weights.queries)
        heads = flat.view(flat.shape[0], self.config.index_n_heads, self.config.index_head_dim)
        return self.rotate(heads, cos[:, None], sin[:, None])

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first R dims, pass the others."""
        rope_dim = self.config.qk_rope_head_dim
        return torch.cat((rotate_interleaved(x[..., :rope_dim], cos, sin), x[..., rope_dim:]), dim=-1)

    def select(self, queries: Tensor, weights: Tensor, batch: StepBatch, region: CacheRegion) -> Tensor:
        """The tokens each row attends to: [T, W] int64, ascending, -1 after the last.

        W is index_topk, or in fast mode no more than the step needs. queries: [T, H, D]; weights: [T, H] fp32; beside packed keys queries
        are rounded like keys. The step's own keys must be stored. Rows that see at most index_topk tokens get all of them, without scores.
        """
        topk = self.config.index_topk
        width = topk if self.numerics.is_deterministic else min(topk, batch.max_visible)
        lists = list_all_visible(batch, width)
        if batch.scored:
            queries, weights = round_queries(queries, weights, region.row_format)
        for scored in batch.scored:
            self._select_scored(lists, queries, weights, scored, region)
        return lists

    def _select_scored(self, lists: Tensor, queries: Tensor, weights: Tensor, scored: ScoredRows, region: CacheRegion) -> None:
        """Fill in the lists of one rectangle, a few rows at a time."""
        num_sequences, num_rows = scored.rows.shape
        context = scored.block_tables.shape[1] * region.block_size_tokens
        at_once = max(1, min(_ROWS_AT_ONCE, self.scratch_bytes // (context * _SCORE_BYTES_PER_ELEMENT)))
        sequence_step, row_step = max(1, at_once // num_rows), min(at_once, num_rows)
        for first in range(0, num_sequences, sequence_step):
            sequences = slice(first, first + sequence_step)
            for row in range(0, num_rows, row_step):
                piece = (sequences, slice(row, row + row_step))
                rows, positions = scored.rows[piece], scored.positions[piece]
                num_blocks = -(-(int(positions.max()) + 1) // KEY_TILE_TOKENS) * (KEY_TILE_TOKENS // region.block_size_tokens)
                tables = scored.block_tables[sequences, :num_blocks]
                scores = self.score(queries[rows], weights[rows], region, tables, positions)
                lists[rows.reshape(-1)] = select_topk(scores.flatten(0, 1), positions.reshape(-1) + 1, self.config.index_topk)

    def score(self, queries: Tensor, weights: Tensor, region: CacheRegion, block_tables: Tensor, positions: Tensor) -> Tensor:
        """[R, t, S] fp32 scores of a rectangle of rows; -inf beyond a row's own position."""
        return index_logits(queries, weights, region, block_tables, positions, gemm=self.numerics.gemm)
