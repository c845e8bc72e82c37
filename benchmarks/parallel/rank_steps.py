"""Decode steps of the shipped checkpoint on several real ranks: how long one takes, and which share of it is exchange."""

import dataclasses
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch

from cluster.config import SHIPPED_CHECKPOINT
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.process_groups import join_store, make_context, serve_store
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
CONTEXT_TOKENS = 200
NUM_SEQUENCES = 4
NUM_DRAFTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Medians over steps, of rank 0. exchange_share: of the time of all steps. calls, bytes_sent: of one step."""

    step_s: float
    exchange_share: float
    calls: float
    bytes_sent: float


def time_steps(layout: ParallelLayout, num_steps: int) -> StepTimes:
    """Start one process a rank, decode `num_steps` steps of 4 sequences with 5 drafts each."""
    spawn = multiprocessing.get_context("spawn")
    store = serve_store(HOST, 1 + layout.num_ranks, TIMEOUT_S)
    results: SimpleQueue[StepTimes] = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=_run_rank, args=(layout, rank, store.port, num_steps, results), daemon=True)
        for rank in range(layout.num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"a rank of {layout.describe()} ended with {[process.exitcode for process in ranks]}")
    return results.get()


def _run_rank(layout: ParallelLayout, rank: int, port: int, num_steps: int, results: "SimpleQueue[StepTimes]") -> None:
    torch.set_num_threads(1)
    store = join_store(HOST, port, 1 + layout.num_ranks, TIMEOUT_S)
    context = make_context(layout, rank, store, TIMEOUT_S)
    config = dataclasses.replace(RuntimeConfig(checkpoint=SHIPPED_CHECKPOINT, num_threads=1, cache_bytes=64 << 20), parallel=layout)
    runtime = GlmRuntime.load(config, context=context)
    blocks_each, homes = CONTEXT_TOKENS // runtime.layout.block_size_tokens + 2, layout.dcp_size
    runner = runtime.attach(PoolMemory(NUM_SEQUENCES * blocks_each, runtime.layout.block_bytes))
    tables = [
        [BlockId((sequence * blocks_each + block) * homes + block % homes) for block in range(blocks_each)]
        for sequence in range(NUM_SEQUENCES)
    ]
    greedy = SamplingParameters(max_tokens=1000, seed=0, temperature=0.0)
    prompts = [[(7 * token + sequence) % 1000 for token in range(CONTEXT_TOKENS)] for sequence in range(NUM_SEQUENCES)]
    runner.run(
        StepPlan(
            step_number=0,
            slices=tuple(
                SequenceSlice(sequence_id=SequenceId(str(n)), tokens=prompt[:-1], start=0, block_table=tables[n], next_token=prompt[-1])
                for n, prompt in enumerate(prompts)
            ),
        )
    )
    decode = StepPlan(
        step_number=1,
        slices=tuple(
            SequenceSlice(
                sequence_id=SequenceId(str(n)), tokens=[prompt[-1], *range(NUM_DRAFTS)], start=CONTEXT_TOKENS - 1, block_table=tables[n],
                sampling=greedy, num_drafts=NUM_DRAFTS, num_next_drafts=NUM_DRAFTS,
            )
            for n, prompt in enumerate(prompts)
        ),
    )  # fmt: skip
    runner.run(decode)
    meter = context.meter
    meter.clear()
    took = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        runner.run(decode)
        took.append(time.perf_counter() - started_s)
    if rank == 0:
        results.put(
            StepTimes(
                step_s=statistics.median(took),
                exchange_share=meter.seconds / sum(took),
                calls=sum(meter.calls.values()) / num_steps,
                bytes_sent=sum(meter.bytes_sent.values()) / num_steps,
            )
        )
    context.world.barrier()
