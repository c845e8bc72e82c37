"""Ranks that have the same block copy it from the one that read it: real gloo, one process a rank."""

from typing import Any

import pytest
import torch

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.block_exchange import cache_sharding, exchange_blocks
from glm_runtime.parallel.collectives import Operation, gathered_bytes
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import config_of, load_rank
from tests.rank_pool import RankPool

BLOCK_BYTES = 256
NUM_LOCAL_BLOCKS = 16
POISON = 0xEE
LAYOUTS = {
    "tp2": ParallelLayout(tp_size=2),
    "pcp2": ParallelLayout(pcp_size=2),
    "tp2 pcp2": ParallelLayout(tp_size=2, pcp_size=2),
    "tp4 dcp2": ParallelLayout(tp_size=4, dcp_size=2),
    "tp2 dcp2": ParallelLayout(tp_size=2, dcp_size=2),
    "two workers of tp2": ParallelLayout(tp_size=2, dp_size=2, is_expert_parallel=True),
}


def pattern(block_id: int, worker: int) -> torch.Tensor:
    """What a block holds; blocks of the same id are others on another worker."""
    return (torch.arange(BLOCK_BYTES) * (3 + block_id) + 101 * worker).to(torch.uint8)


def copies_of(layout: ParallelLayout, num_blocks: int, first_block: int) -> tuple[BlockCopy, ...]:
    """Blocks of a sequence as READs put them, with ids out of order."""
    sharding = cache_sharding(layout)
    homes = [block % sharding.num_homes for block in range(first_block, first_block + num_blocks)]
    ids = [sharding.group_id(home, BlockId((5 * place + 2) % NUM_LOCAL_BLOCKS)) for place, home in enumerate(homes)]
    return sharding.copies(first_block, ids)


def run_exchange(context: ParallelContext, num_blocks: int, first_block: int, round_bytes: int) -> dict[str, int]:
    """One rank's part: poisons its pool but for what it has read, exchanges, and looks. Each worker's blocks are its own."""
    layout = context.layout
    sharding, place = cache_sharding(layout), context.place
    worker, own = place.data, context.worker.rank
    copies = copies_of(layout, num_blocks + worker, first_block)
    blocks = torch.full((NUM_LOCAL_BLOCKS, BLOCK_BYTES), POISON, dtype=torch.uint8)
    for block_id, rank in copies:
        if rank == own:
            blocks[sharding.local_id(block_id)] = pattern(block_id, worker)
    context.meter.clear()
    exchange_blocks(context.worker, sharding, blocks, copies, round_bytes)
    expected = torch.full_like(blocks, POISON)
    for block_id, _ in copies:
        if sharding.has(own, block_id):
            expected[sharding.local_id(block_id)] = pattern(block_id, worker)
    assert torch.equal(blocks, expected), f"rank {context.rank}: blocks {(blocks != expected).any(1).nonzero().flatten().tolist()} differ"
    key = (GroupKind.WORKER, Operation.ALL_GATHER)
    return {"calls": context.meter.calls.get(key, 0), "bytes": context.meter.bytes_sent.get(key, 0)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_has_every_block_of_its_home_afterwards(rank_pool: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    for num_blocks, first_block in ((7, 0), (1, 3), (10, 5)):
        counted = rank_pool.run(layout, run_exchange, num_blocks, first_block, 1 << 20)
        if cache_sharding(layout).num_copies == 1:
            assert counted == [{"calls": 0, "bytes": 0}] * layout.num_ranks, "nobody has what another lacks"
            continue
        per_rank = -(-num_blocks // layout.num_worker_ranks)
        assert counted[0] == {"calls": 1, "bytes": gathered_bytes(per_rank * BLOCK_BYTES, layout.num_worker_ranks)}


def test_many_blocks_go_in_rounds(rank_pool: RankPool) -> None:
    counted = rank_pool.run(LAYOUTS["tp2"], run_exchange, 11, 0, 2 * BLOCK_BYTES)
    assert [each["calls"] for each in counted] == [3, 3], "six blocks of one rank, two at once"


# -- in a step ---------------------------------------------------------------------------------------------------------


def decode_after(context: ParallelContext, config: RuntimeConfig, prompt: list[int], is_pulled: bool) -> tuple[tuple[int, ...], ...]:
    """What a prompt's last chunk and the row after it draw. is_pulled: of what the first chunk has stored each rank keeps only what it
    would have read from a peer, and the second step begins with the copies.
    """
    runtime = load_rank(context, config)
    runner = runtime.attach(PoolMemory(8, runtime.layout.block_bytes))
    sharding = cache_sharding(context.layout)
    table = [BlockId(block) for block in (5, 2, 7)]
    sampling = SamplingParameters(max_tokens=4, seed=0, temperature=0.0)
    size = runtime.layout.block_size_tokens

    def step(tokens: list[int], start: int, copies: tuple[BlockCopy, ...] = (), **members: Any) -> tuple[int, ...]:
        piece = SequenceSlice(sequence_id=SequenceId("one"), tokens=tokens, start=start, block_table=table, sampling=sampling, **members)
        return runner.run(StepPlan(step_number=1, slices=(piece,), copies=copies)).samples[SequenceId("one")]

    first = step(prompt, 0)
    copies: tuple[BlockCopy, ...] = ()
    if is_pulled:
        copies = sharding.copies(0, table[: -(-len(prompt) // size)])
        for block_id, rank in copies:
            if rank != context.worker.rank:
                runner.cache.blocks[block_id] = POISON
    empty = StepPlan(step_number=2, slices=(), copies=copies[:1])
    assert runner.run(empty).samples == {}, "a step may do nothing but copy"
    return first, step([first[0]], len(prompt), copies[1:])


@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], LAYOUTS["pcp2"]], ids=lambda layout: layout.describe())
def test_a_step_reads_what_it_has_copied_first(rank_pool: RankPool, layout: ParallelLayout) -> None:
    prompt = make_prompt(150, 3)
    config = config_of(TINY)
    undisturbed = rank_pool.run(layout, decode_after, config, prompt, False)
    assert rank_pool.run(layout, decode_after, config, prompt, True) == undisturbed
