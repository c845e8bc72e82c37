"""The lightning indexer's scores, over paged index keys."""

from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.impl import Impl, check_shape, check_width, choose_impl
from glm_runtime.ops.index_logits import cpu, native, reference
from glm_runtime.paged_cache import CacheRegion

__all__ = ["KEY_TILE_TOKENS", "index_logits"]

KEY_TILE_TOKENS = cpu.KEY_TILE_TOKENS
"""Contexts are padded to whole tiles of keys, so that a key's column in its matrix product does not depend on the context."""


def index_logits(
    queries: Tensor,
    weights: Tensor,
    keys: CacheRegion,
    block_tables: Tensor,
    positions: Tensor,
    *,
    gemm: Products,
    impl: Impl | None = None,
) -> Tensor:
    """Score every visible key for every row. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    num_sequences, num_rows, num_heads, width = queries.shape
    check_shape("index_logits", "weights", weights, (num_sequences, num_rows, num_heads))
    check_width("index_logits", "keys", keys, width)
    check_shape("index_logits", "block_tables", block_tables, (num_sequences, -1))
    check_shape("index_logits", "positions", positions, (num_sequences, num_rows))
    if (context := block_tables.shape[1] * keys.block_size_tokens) % KEY_TILE_TOKENS:
        raise ValueError(f"index_logits: block_tables cover {context} tokens; expected a multiple of {KEY_TILE_TOKENS}")
    chosen = choose_impl(impl, queries)
    if chosen == "native":
        return native.index_logits(queries, weights, keys, block_tables, positions)
    if chosen == "cpu":
        return cpu.index_logits(queries, weights, keys, block_tables, positions, gemm)
    return reference.index_logits(queries, weights, keys, block_tables, positions)
