"""The specification of the conversion, token by token. Legend: `T` rows, `W` list width, `R` sequences, `B` blocks of a table."""

import torch
from torch import Tensor

from glm_runtime.paged_cache import CacheRegion


def topk_to_slots(
    lists: Tensor, row_sequences: Tensor, block_tables: Tensor, region: CacheRegion, addresses: Tensor, counts: Tensor
) -> None:
    """addresses[t, i] = where slot block_table[sequence(t)][s div size] * size + s mod size lies, s = lists[t, i]. Source: FACTS 5.

    lists: [T, W] int64 token positions of the row's own sequence. row_sequences: [T] int64. block_tables: [R, B] int64 block ids.
    addresses: [T, W] int64, rows of `region.rows`; -1 for -1, for a token behind the table and for a block outside the pool.
    counts: [T] int64, addresses of a row that are not -1. Rounds: nothing.
    """
    size, num_blocks = region.block_size_tokens, region.planes[0].shape[0]
    for row, listed in enumerate(lists.tolist()):
        table = block_tables[row_sequences[row]].tolist()
        slots = []
        for token in listed:
            block = table[token // size] if 0 <= token < len(table) * size else -1
            slots.append(block * size + token % size if 0 <= block < num_blocks else -1)
        addresses[row] = region.addresses(torch.tensor(slots, dtype=torch.int64))
        counts[row] = sum(slot >= 0 for slot in slots)
