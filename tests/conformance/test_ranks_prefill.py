"""Prefill context parallelism on real ranks: without other splits every row is computed as one rank computes it, to the bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from glm_runtime.engine.offline import generate
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, generate_on, load_rank, one_rank_answers
from tests.rank_pool import RankPool

PROMPTS = [make_prompt(length, number) for number, length in enumerate((5, 64, 90, 130, 63, 1))]
GREEDY = SamplingParameters(max_tokens=30, seed=0, temperature=0.0)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "no drafts": {"max_drafts": 0},
    "chunks": {"chunk_tokens": 37, "max_batch_sequences": 3},
}
CONFIG = config_of(TINY)
PACKED = config_of(TINY, cache_format="fp8_ds_mla", index_format="fp8")


def caches_after(context: ParallelContext, config: RuntimeConfig, prompt: list[int]) -> bytes:
    """All blocks of a prompt that was computed in one step with a token after it, the MTP layer's keys included."""
    return cache_of(load_rank(context, config), prompt)


def cache_of(runtime: GlmRuntime, prompt: list[int]) -> bytes:
    num_blocks = -(-len(prompt) // runtime.layout.block_size_tokens)
    memory = PoolMemory(num_blocks, runtime.layout.block_bytes)
    table = [BlockId(block) for block in reversed(range(num_blocks))]
    piece = SequenceSlice(sequence_id=SequenceId("a"), tokens=prompt, start=0, block_table=table, next_token=7)
    runtime.attach(memory).run(StepPlan(step_number=0, slices=(piece,)))
    return bytes(memory.buffer[: num_blocks * runtime.layout.block_bytes])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pcp_size", [2, 4])
def test_answers_are_those_of_one_rank_without_a_margin(rank_pool: RankPool, pcp_size: int, way: str) -> None:
    expected = generate(GlmRuntime.load(CONFIG), PROMPTS, GREEDY, max_drafts=0)
    results = rank_pool.run(ParallelLayout(pcp_size=pcp_size), generate_on, CONFIG, PROMPTS, GREEDY, WAYS[way])
    assert results == [expected] * pcp_size


@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["auto", "packed"])
@pytest.mark.parametrize("length", [1, 3, 70, 200])
def test_every_rank_has_every_key_as_one_rank_stores_it(rank_pool: RankPool, config: RuntimeConfig, length: int) -> None:
    prompt = make_prompt(length, 77)
    assert rank_pool.run(ParallelLayout(pcp_size=4), caches_after, config, prompt) == [cache_of(GlmRuntime.load(config), prompt)] * 4


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pcp_size=2, is_expert_parallel=True),
        ParallelLayout(pcp_size=2, tp_size=2),
        ParallelLayout(pcp_size=2, tp_size=2, is_expert_parallel=True),
    ],
    ids=lambda layout: layout.describe(),
)
def test_with_other_splits_answers_are_those_of_one_rank_up_to_ties(rank_pool: RankPool, layout: ParallelLayout) -> None:
    first, *others = rank_pool.run(layout, generate_on, CONFIG, PROMPTS, GREEDY, {"chunk_tokens": 50})
    assert_answers(first, *one_rank_answers(CONFIG, PROMPTS, GREEDY))
    assert all(answers == first for answers in others)


def exchanges(context: ParallelContext, config: RuntimeConfig, prompt: list[int]) -> tuple[int, int]:
    """Calls and bytes of the gathers of one prefill step."""
    runtime = load_rank(context, config)
    context.meter.clear()
    cache_of(runtime, prompt)
    key = (GroupKind.PREFILL_CONTEXT, Operation.ALL_GATHER)
    return context.meter.calls[key], context.meter.bytes_sent[key]


def test_keys_travel_once_a_layer_in_the_cache_s_format(rank_pool: RankPool) -> None:
    num_rows, size = 128, 4
    layout = GlmRuntime.load(PACKED).layout
    config = GlmRuntime.load(PACKED).config
    calls, sent = rank_pool.run(ParallelLayout(pcp_size=size), exchanges, PACKED, make_prompt(num_rows, 5))[0]
    assert calls == config.num_hidden_layers + 1 + 2, "one a layer, the MTP layer's too, and both hidden states"
    hidden_bytes = 2 * config.hidden_size * torch.float32.itemsize
    assert sent == (size - 1) * num_rows // size * (layout.block_bytes // layout.block_size_tokens + hidden_bytes)
