"""Blocks that one rank of a worker has read and the others that have them copy, at the start of a step.

Knows: how the bytes of blocks get from the rank that has them to the others with the same home. Each block has crossed the wire between
workers once; these copies are the worker's own affair. Does not know which blocks, or when (`StepPlan.copies`).
"""

import itertools
from collections.abc import Sequence

from torch import Tensor

from glm_runtime.parallel.collectives import Collectives
from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.geometry import BlockCopy, CacheSharding
from kv_transfer.identity import BlockId

ROUND_BYTES = 32 << 20
"""What a rank sends at once, at most or one block: every rank has room for as much from each of the others."""


def cache_sharding(layout: ParallelLayout) -> CacheSharding:
    """How the blocks of one worker lie on its ranks: on `dcp_size` homes, each as often as there are decode context groups."""
    return CacheSharding(layout.num_worker_ranks, layout.dcp_size)


def exchange_blocks(
    worker: Collectives, sharding: CacheSharding, blocks: Tensor, copies: Sequence[BlockCopy], round_bytes: int = ROUND_BYTES
) -> None:
    """Copy each block from the rank that has it to the others with its home. All ranks of the worker call it with the same copies.

    blocks: [P, block_bytes] uint8, this rank's pool; changed in place. When this returns, what is copied to this rank is here.
    """
    if worker.size == 1 or not copies:
        return
    of_rank: list[list[BlockId]] = [[] for _ in range(worker.size)]
    for block_id, rank in copies:
        of_rank[rank].append(block_id)
    num_at_once = max(round_bytes // blocks.shape[1], 1)
    for start in range(0, max(map(len, of_rank)), num_at_once):
        _exchange_round(worker, sharding, blocks, [ids[start : start + num_at_once] for ids in of_rank])


def _exchange_round(worker: Collectives, sharding: CacheSharding, blocks: Tensor, of_rank: Sequence[Sequence[BlockId]]) -> None:
    own = worker.rank
    sent = blocks.new_zeros(max(map(len, of_rank)), blocks.shape[1])  # equal parts: who has fewer sends zeros behind them
    mine = of_rank[own]
    if mine:
        sent[: len(mine)] = blocks[[sharding.local_id(block_id) for block_id in mine]]
    received = worker.all_gather(sent)  # [ranks, blocks, block_bytes]
    for rank, ids in itertools.compress(enumerate(of_rank), (rank != own for rank in range(worker.size))):
        places = [place for place, block_id in enumerate(ids) if sharding.has(own, block_id)]
        if places:
            blocks[[sharding.local_id(ids[place]) for place in places]] = received[rank, places]
