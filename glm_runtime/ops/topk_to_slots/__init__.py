"""Logical token lists as cache addresses, once per index group and step."""

import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.topk_to_slots import cpu, native, reference
from glm_runtime.paged_cache import CacheRegion

__all__ = ["topk_to_slots"]


def topk_to_slots(
    lists: Tensor,
    row_sequences: Tensor,
    block_tables: Tensor,
    region: CacheRegion,
    *,
    addresses: Tensor,
    counts: Tensor,
    impl: Impl | None = None,
) -> None:
    """Write each listed token's address to `addresses`, how many there are to `counts`. See `reference.py`.

    Raises ValueError for shapes that do not fit together and for buffers that are not contiguous int64.
    """
    num_rows, width = lists.shape
    check_shape("topk_to_slots", "row_sequences", row_sequences, (num_rows,))
    check_shape("topk_to_slots", "block_tables", block_tables, (-1, -1))
    check_shape("topk_to_slots", "addresses", addresses, (num_rows, width))
    check_shape("topk_to_slots", "counts", counts, (num_rows,))
    for argument, buffer in (("addresses", addresses), ("counts", counts)):
        if buffer.dtype != torch.int64 or not buffer.is_contiguous():
            raise ValueError(f"topk_to_slots: {argument} is {buffer.dtype} with strides {buffer.stride()}; expected contiguous int64")
    match choose_impl(impl, lists):
        case "native":
            native.topk_to_slots(lists, row_sequences, block_tables, region, addresses, counts)
        case "cpu":
            cpu.topk_to_slots(lists, row_sequences, block_tables, region, addresses, counts)
        case _:
            reference.topk_to_slots(lists, row_sequences, block_tables, region, addresses, counts)
