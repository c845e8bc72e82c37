"""Rounding of rows into a cache format and back: the only code that knows what a packed byte stands for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.ops.cache_rows import cpu, native, reference
from glm_runtime.ops.cache_rows.native import described_region
from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowFormat, RowKind

__all__ = ["decode_rows", "described_region", "encode_rows", "load_blocks", "load_sequence", "round_queries", "store_rows"]

_ROUNDS_QUERIES = frozenset({RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0, RowKind.INDEX_MXFP4})


def encode_rows(values: Tensor, row_format: RowFormat, *, impl: Impl | None = None) -> tuple[Tensor, ...]:
    """Round rows [T, D] into the format's planes. See `reference.py`. Raises ValueError for rows of another width."""
    check_shape("encode_rows", "values", values, (-1, row_format.width))
    match choose_impl(impl, values):
        case "native":
            return native.encode_rows(values, row_format)
        case "cpu":
            return cpu.encode_rows(values, row_format)
        case "reference":
            return reference.encode_rows(values, row_format)


def decode_rows(
    stored: Sequence[Tensor], row_format: RowFormat, *, out: Tensor | None = None, impl: Impl | None = None
) -> tuple[Tensor, Tensor | None]:
    """The numbers of stored rows, and their scales where the format leaves that product to the reader. See `reference.py`.

    out: [T, D] fp32, contiguous, for the numbers; without it they are new. Raises ValueError for planes that are not the format's.
    """
    dtype = cpu.PLAIN_DTYPES.get(row_format.kind, torch.uint8)
    for plane, size in zip(stored, row_format.plane_bytes, strict=True):
        check_shape("decode_rows", "stored", plane, (stored[0].shape[0], size // dtype.itemsize))
    numbers = torch.empty(stored[0].shape[0], row_format.width) if out is None else out
    check_shape("decode_rows", "out", numbers, (stored[0].shape[0], row_format.width))
    if choose_impl(impl, stored[0]) == "reference":
        return numbers, reference.decode_rows(stored, row_format.kind, numbers)
    return numbers, cpu.decode_rows(stored, row_format.kind, numbers)


def store_rows(region: CacheRegion, slots: Tensor, values: Tensor, *, impl: Impl | None = None) -> None:
    """Round rows [T, D] and write them at slots [T]; a negative slot stores nothing, and no other may occur twice.

    This is also how rows that `fused_norm_rope` materialised are inserted, once those of all ranks are gathered. Raises ValueError for
    rows of another width than the region's, and for another number of slots.
    """
    check_shape("store_rows", "values", values, (-1, region.row_format.width))
    check_shape("store_rows", "slots", slots, (values.shape[0],))
    if impl == "native":
        native.store_rows(region, slots, values)
        return
    valid = (slots >= 0).nonzero().squeeze(1)
    region.put(slots[valid], encode_rows(values[valid], region.row_format, impl=impl))


def load_blocks(region: CacheRegion, block_ids: Tensor, *, impl: Impl | None = None) -> tuple[Tensor, Tensor | None]:
    """All rows of whole blocks, in the order of block_ids [n]: numbers [n * block_size, D] fp32 and their scales, as `decode_rows`."""
    gathered = [plane.index_select(0, block_ids).flatten(0, 1) for plane in region.planes]
    return decode_rows(gathered, region.row_format, impl=impl)


def load_sequence(region: CacheRegion, block_ids: Tensor, num_tokens: int, dtype: torch.dtype, *, impl: Impl | None = None) -> Tensor:
    """The first `num_tokens` rows of a sequence's blocks [n], as numbers [num_tokens, D] of `dtype`, new. For formats of one plane.

    Rounds: to `dtype`, once. Raises ValueError for a format of several planes, and for more tokens than the blocks hold.
    """
    if len(region.planes) > 1 or num_tokens > block_ids.shape[0] * region.block_size_tokens:
        raise ValueError(f"load_sequence: {num_tokens} tokens of {block_ids.shape[0]} blocks of {region.row_format.kind.value}")
    if impl == "native":
        return native.load_sequence(region, block_ids, num_tokens, dtype)
    return load_blocks(region, block_ids, impl=impl)[0][:num_tokens].to(dtype)


def round_queries(queries: Tensor, weights: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """Index queries as a packed index format computes with them: rounded like a key, per (token, head). Source: FACTS 3.5.

    queries: [T, H, D]; weights: [T, H] fp32. Returns queries whose product with stored keys is meant, and weights that carry the
    queries' FP8 scales (they are positive, so they may cross the ReLU). With bf16 and fp32 keys both come back as they are.
    """
    if row_format.kind not in _ROUNDS_QUERIES:
        return queries, weights
    numbers, scales = decode_rows(encode_rows(queries.flatten(0, 1), row_format), row_format)
    return numbers.view(queries.shape), weights if scales is None else weights * scales.view(weights.shape)
