"""The selection by rectangles of rows, as many at a time as the scratch budget allows. Contract: `reference.py`.

Each score depends on its own row and key only (`index_logits`), and the top-k is exact: so a row's list is the same in any batch.
"""

import torch
from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS, index_logits
from glm_runtime.ops.select_topk import select_topk
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import ScoredRows, StepBatch

_SCORE_BYTES_PER_ELEMENT = 24
"""fp32 score, int32 rank, int64 key and its top-k copy, per row and token: what the budget must hold."""

_ROWS_AT_ONCE = 256
"""Rows of a long chunk that are scored together read only the tiles of keys up to the last of them, not up to the chunk's end."""


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheRegion,
    batch: StepBatch,
    topk: int,
    lists: Tensor,
    scores: Tensor | None,
    gemm: Products,
    scratch_bytes: int,
) -> None:
    """Contract: `reference.index_select`."""
    tokens = torch.arange(lists.shape[1])
    is_listed = (tokens < batch.visible[:, None]) & (batch.visible[:, None] <= topk)
    lists.copy_(torch.where(is_listed, tokens, -1))
    if scores is not None:
        scores.fill_(float("-inf"))
    for scored in batch.scored:
        _select_scored(lists, scores, queries, weights, scored, keys, topk, gemm, scratch_bytes)


def _select_scored(
    lists: Tensor,
    best_scores: Tensor | None,
    queries: Tensor,
    weights: Tensor,
    scored: ScoredRows,
    keys: CacheRegion,
    topk: int,
    gemm: Products,
    scratch_bytes: int,
) -> None:
    """Fill in the lists of one rectangle, a few rows at a time."""
    num_sequences, num_rows = scored.rows.shape
    context = scored.block_tables.shape[1] * keys.block_size_tokens
    at_once = max(1, min(_ROWS_AT_ONCE, scratch_bytes // (context * _SCORE_BYTES_PER_ELEMENT)))
    sequence_step, row_step = max(1, at_once // num_rows), min(at_once, num_rows)
    for first in range(0, num_sequences, sequence_step):
        sequences = slice(first, first + sequence_step)
        for row in range(0, num_rows, row_step):
            piece = (sequences, slice(row, row + row_step))
            rows, positions = scored.rows[piece], scored.positions[piece]
            num_blocks = -(-(int(positions.max()) + 1) // KEY_TILE_TOKENS) * (KEY_TILE_TOKENS // keys.block_size_tokens)
            tables = scored.block_tables[sequences, :num_blocks]
            scores = index_logits(queries[rows], weights[rows], keys, tables, positions, gemm=gemm, impl="cpu").flatten(0, 1)
            chosen = select_topk(scores, positions.reshape(-1) + 1, topk, impl="cpu")
            lists[rows.reshape(-1)] = chosen
            if best_scores is not None:
                best_scores[rows.reshape(-1)] = _scores_of(chosen, scores)


def _scores_of(chosen: Tensor, scores: Tensor) -> Tensor:
    """[t, W]: the scores [t, S] of chosen tokens, 0 for -0, -inf where there is none."""
    padded = torch.nn.functional.pad(scores + 0.0, (0, 1), value=float("-inf"))
    return padded.gather(1, torch.where(chosen < 0, scores.shape[1], chosen))
