"""The conversion in whole-tensor operations. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.paged_cache import CacheRegion


def topk_to_slots(
    lists: Tensor, row_sequences: Tensor, block_tables: Tensor, region: CacheRegion, addresses: Tensor, counts: Tensor
) -> None:
    """Contract: `reference.topk_to_slots`."""
    size, num_blocks, table_width = region.block_size_tokens, region.planes[0].shape[0], block_tables.shape[1]
    is_token = (lists >= 0) & (lists < table_width * size)
    tokens = torch.where(is_token, lists, 0)
    in_table = torch.div(tokens, size, rounding_mode="floor")
    blocks = block_tables.take(row_sequences[:, None] * table_width + in_table)
    is_cached = is_token & (blocks >= 0) & (blocks < num_blocks)
    addresses.copy_(region.addresses(torch.where(is_cached, blocks * size + (tokens - in_table * size), -1)))
    torch.sum(is_cached, dim=1, out=counts)
