"""Decode context parallelism on real ranks: the answers of one rank, its lists, and as many exchanges as there have to be."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.index_group import IndexGroup, Selection
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.decode_context import group_block
from glm_runtime.parallel.layout import CombineChoice, GroupKind, ParallelLayout
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, generate_on, load_rank, one_rank_answers
from tests.rank_pool import RankPool

PROMPTS = [make_prompt(length, number) for number, length in enumerate((5, 64, 90, 130, 63, 1, 300))]
"""Around block edges, from below the 64 tokens that the indexer selects to beyond, and such that a rank has nothing of some."""
GREEDY = SamplingParameters(max_tokens=24, seed=0, temperature=0.0)
SMALL_BLOCKS = config_of(TINY, block_size_tokens=16)

Answers = tuple[list[list[int]], list[list[float]]]


def layout_of(tp: int, dcp: int, combine: CombineChoice = "a2a", replicates: bool = True) -> ParallelLayout:
    return ParallelLayout(tp_size=tp, dcp_size=dcp, dcp_combine=combine, replicates_queries=replicates)


def name_of(layout: ParallelLayout) -> str:
    return f"{layout.describe()} {layout.dcp_combine} {'replicated' if layout.replicates_queries else 'gathered'}"


SIZES = [(2, 2), (4, 2), (4, 4)]
WAYS: Sequence[tuple[CombineChoice, bool]] = [("a2a", True), ("a2a", False), ("ag_rs", True), ("ag_rs", False)]
LAYOUTS = [layout_of(*size, *way) for size in SIZES for way in WAYS]
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "no drafts": {"max_drafts": 0},
    "chunks": {"chunk_tokens": 37, "max_batch_sequences": 3},
}


@pytest.fixture(scope="module")
def greedy() -> Answers:
    return one_rank_answers(SMALL_BLOCKS, PROMPTS, GREEDY)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_greedy_answers_are_those_of_one_rank(rank_pool: RankPool, greedy: Answers, layout: ParallelLayout) -> None:
    first, *others = rank_pool.run(layout, generate_on, SMALL_BLOCKS, PROMPTS, GREEDY, OPTIONS["chunks"])
    assert_answers(first, *greedy)
    assert all(answers == first for answers in others), "all ranks know what the first has drawn"


@pytest.mark.parametrize("layout", [layout_of(2, 2), layout_of(4, 4, "ag_rs", False)], ids=name_of)
def test_neither_drafts_nor_chunks_change_a_bit(rank_pool: RankPool, greedy: Answers, layout: ParallelLayout) -> None:
    """For one layout that is so without a margin, as on one rank."""
    answers = [rank_pool.run(layout, generate_on, SMALL_BLOCKS, PROMPTS, GREEDY, options)[0] for options in OPTIONS.values()]
    assert all(each == answers[0] for each in answers)
    assert_answers(answers[0], *greedy)


@pytest.mark.parametrize("choices", [{"numerics": "fast"}, {"kernels": "torch"}, {"cache_format": "fp8_ds_mla"}], ids=str)
def test_other_numerics_kernels_and_formats(rank_pool: RankPool, choices: Mapping[str, Any]) -> None:
    config = config_of(TINY, **choices)
    prompts, sampling = PROMPTS[2:4], SamplingParameters(max_tokens=12, seed=0, temperature=0.0)
    first, second = rank_pool.run(layout_of(2, 2), generate_on, config, prompts, sampling, OPTIONS["chunks"])
    assert first == second
    if "numerics" not in choices:
        assert_answers(first, *one_rank_answers(config, prompts, sampling))


# One step, looked at closely.

STARTS = (20, 63, 64, 100, 333)
"""Of sequences that decode one row each: the last three see more than the 64 tokens that are selected."""


def tokens_of(number: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 2500, (count,), generator=generator).tolist()


def prompts_and_rows(num_homes: int, block_size: int, num_drafts: int = 0) -> Iterator[tuple[SequenceSlice, SequenceSlice]]:
    """Each sequence's prompt, and its decode row, which asks for drafts after it."""
    taken = 0
    for number, start in enumerate(STARTS):
        count = -(-(start + 1) // block_size)
        table = [group_block(taken + place // num_homes, place % num_homes, num_homes) for place in range(count)]
        taken += -(-count // num_homes)
        tokens = tokens_of(number, start + 1)
        name = SequenceId(str(number))
        prompt = SequenceSlice(sequence_id=name, tokens=tokens[:-1], start=0, block_table=table, next_token=tokens[-1])
        yield (
            prompt,
            SequenceSlice(
                sequence_id=name, tokens=tokens[-1:], start=start, block_table=table, sampling=GREEDY, num_next_drafts=num_drafts
            ),
        )


Step = tuple[Tensor, list[Tensor], dict[tuple[GroupKind, Operation], int], dict[tuple[GroupKind, Operation], int]]


def decode_step(context: ParallelContext, config: RuntimeConfig) -> Step:
    """Hidden states, lists of each group, and the calls and bytes of one decode step after prompts."""
    return _decode_step(load_rank(context, config), context)


def _decode_step(runtime: GlmRuntime, context: ParallelContext) -> Step:
    runner = runtime.attach(PoolMemory(64, runtime.layout.block_bytes))
    prompts, rows = zip(*prompts_and_rows(runtime.num_homes, runtime.layout.block_size_tokens), strict=True)
    lists: list[Tensor] = []
    with torch.inference_mode():
        runner.forward(StepPlan(step_number=0, slices=prompts))
        context.meter.clear()
        convert = IndexGroup.convert

        @functools.wraps(convert)
        def recorded(group: IndexGroup, given: Tensor, *args: Any) -> Selection:
            lists.append(given.clone())
            return convert(group, given, *args)

        IndexGroup.convert = recorded  # type: ignore[method-assign]
        try:
            hidden = runner.forward(StepPlan(step_number=1, slices=rows))
        finally:
            IndexGroup.convert = convert  # type: ignore[method-assign]
    return hidden.clone(), lists, dict(context.meter.calls), dict(context.meter.bytes_sent)


@pytest.fixture(scope="module")
def alone() -> Step:
    return _decode_step(GlmRuntime.load(SMALL_BLOCKS), one_rank())


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_one_step(rank_pool: RankPool, alone: Step, layout: ParallelLayout) -> None:
    ranks = rank_pool.run(layout, decode_step, SMALL_BLOCKS)
    hidden, lists, _, _ = alone
    for found, found_lists, calls, sent in ranks:
        # Layer 0 sees what one rank's sees, bit by bit; what later layers see has been summed in another order.
        assert torch.equal(found_lists[0], lists[0])
        assert all(torch.equal(mine, first) for mine, first in zip(found_lists, ranks[0][1], strict=True))
        assert (found - hidden).abs().max() < 1e-4 * hidden.abs().max()
        expected_calls, expected_bytes = exchanges(layout)
        assert {key: count for key, count in calls.items() if key[0] is GroupKind.DECODE_CONTEXT} == expected_calls
        assert {key: count for key, count in sent.items() if key[0] is GroupKind.DECODE_CONTEXT} == expected_bytes


def test_all_ways_agree_to_the_bit(rank_pool: RankPool) -> None:
    """In fp32 the same products are formed and added in the same order, wherever."""
    first, *others = [rank_pool.run(layout_of(4, 4, *way), decode_step, SMALL_BLOCKS)[0][0] for way in WAYS]
    assert all(torch.equal(hidden, first) for hidden in others)


def draft_steps(context: ParallelContext, config: RuntimeConfig) -> tuple[int, dict[tuple[GroupKind, Operation], int]]:
    """Of a decode step that drafts: draft steps, and calls."""
    runtime = load_rank(context, config)
    runner = runtime.attach(PoolMemory(64, runtime.layout.block_bytes))
    prompts, rows = zip(*prompts_and_rows(runtime.num_homes, runtime.layout.block_size_tokens, num_drafts=3), strict=True)
    runner.run(StepPlan(step_number=0, slices=prompts))
    context.meter.clear()
    result = runner.run(StepPlan(step_number=1, slices=rows))
    return result.num_draft_steps, dict(context.meter.calls)


@pytest.mark.parametrize("replicates", [True, False])
def test_draft_steps_exchange_outputs_but_no_scores(rank_pool: RankPool, replicates: bool) -> None:
    for num_steps, calls in rank_pool.run(layout_of(4, 4, "a2a", replicates), draft_steps, SMALL_BLOCKS):
        assert num_steps == 3
        layers = 7 + num_steps
        assert calls[GroupKind.DECODE_CONTEXT, Operation.ALL_TO_ALL] == layers
        assert calls[GroupKind.DECODE_CONTEXT, Operation.ALL_GATHER] == 4 + 1 + (0 if replicates else layers), "step 0 has an indexer"


def exchanges(layout: ParallelLayout) -> tuple[dict[tuple[GroupKind, Operation], int], dict[tuple[GroupKind, Operation], int]]:
    """Calls and bytes of one rank in one step of fp32 rows, by FACTS 6.4: the shipped checkpoint has 7 layers, 4 of which index."""
    layers, indexing, topk, heads, latent, rope = 7, 4, 64, 4 // layout.tp_size, 512, 64
    rows, scored, others = len(STARTS), 3, layout.dcp_size - 1
    calls = {Operation.ALL_GATHER: indexing}
    sent = {Operation.ALL_GATHER: indexing * scored * topk * 8 * others}
    if layout.dcp_combine == "a2a":
        calls[Operation.ALL_TO_ALL] = layers
        sent[Operation.ALL_TO_ALL] = layers * rows * heads * (latent + 1) * 4 * others
    else:
        calls[Operation.ALL_GATHER] += layers
        sent[Operation.ALL_GATHER] += layers * rows * heads * layout.dcp_size * 4 * others
        calls[Operation.REDUCE_SCATTER] = layers
        sent[Operation.REDUCE_SCATTER] = layers * rows * heads * latent * 4 * others
    if not layout.replicates_queries:
        calls[Operation.ALL_GATHER] += layers
        sent[Operation.ALL_GATHER] += layers * rows * heads * (latent + rope) * 4 * others
    kind = GroupKind.DECODE_CONTEXT
    return {(kind, operation): n for operation, n in calls.items()}, {(kind, operation): n for operation, n in sent.items()}
