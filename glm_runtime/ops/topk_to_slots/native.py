"""The conversion in one pass. Contract: `reference.py`."""

from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.paged_cache import CacheRegion


def topk_to_slots(
    lists: Tensor, row_sequences: Tensor, block_tables: Tensor, region: CacheRegion, addresses: Tensor, counts: Tensor
) -> None:
    """Contract: `reference.topk_to_slots`."""
    lists, row_sequences, block_tables = lists.contiguous(), row_sequences.contiguous(), block_tables.contiguous()
    blocks = region.planes[0]
    library().glm_topk_to_slots(
        lists.data_ptr(), *lists.shape, row_sequences.data_ptr(), block_tables.data_ptr(), block_tables.shape[1],
        region.block_size_tokens, blocks.shape[0], blocks.stride(0) // region.unit, blocks.stride(1) // region.unit,
        addresses.data_ptr(), counts.data_ptr(),
    )  # fmt: skip
