"""Data parallelism on real ranks: every worker answers its own prompts with one rank's answers, whatever the others have to do.

All ranks must meet in the same exchanges, so a mistake in what they agree on shows as ranks that wait for each other, or as sums of the
wrong rows.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from glm_runtime.engine.offline import generate
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.parallel.lock_step import LockStep
from glm_runtime.parallel.process_groups import join_store, make_context, serve_store
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import EngineFault
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, load_rank, one_rank_answers
from tests.rank_pool import START_TIMEOUT_S, RankPool

CONFIG = config_of(TINY)
GREEDY = SamplingParameters(max_tokens=24, seed=0, temperature=0.0)
LENGTHS = ((130, 5, 64), (90,), (63, 1), ())
"""Of each worker's prompts: around block edges, beyond the 64 tokens that the indexer selects, unequally many, none at all."""
PROMPTS = [[make_prompt(length, 10 * worker + number) for number, length in enumerate(each)] for worker, each in enumerate(LENGTHS)]
NUM_MOE_LAYERS = len(GlmRuntime.load(CONFIG).config.moe_layers)
NUM_IDLE_STEPS = 3
"""The second worker begins so much later."""
LAYOUTS = [
    ParallelLayout(dp_size=2, is_expert_parallel=True),
    ParallelLayout(dp_size=4, is_expert_parallel=True),
    ParallelLayout(dp_size=2, tp_size=2, is_expert_parallel=True),
    ParallelLayout(dp_size=2, tp_size=2, dcp_size=2, is_expert_parallel=True),
]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "no drafts": {"max_drafts": 0},
    "chunks": {"chunk_tokens": 37, "max_batch_sequences": 2},
}
Answers = tuple[list[list[int]], list[list[float]]]


class Ran(NamedTuple):
    """answers: of this rank's worker. exchanges, agreements: calls over all experts' ranks, and over the workers."""

    answers: list[list[int]]
    exchanges: int
    agreements: int


def answer_own(context: ParallelContext, options: Mapping[str, Any], config: RuntimeConfig = CONFIG) -> Ran:
    """What this rank's worker says to its prompts. The second worker's come late, so that it only serves the first at first."""
    runtime = load_rank(context, config)
    worker = context.place.data
    context.meter.clear()
    if worker == 1:
        runner = runtime.attach(PoolMemory(1, runtime.layout.block_bytes))
        for _ in range(NUM_IDLE_STEPS):
            assert not runner.run(StepPlan(step_number=0, slices=())).is_idle
    answers = generate(runtime, PROMPTS[worker], GREEDY, **options)
    calls = context.meter.calls
    return Ran(answers, calls[GroupKind.WORLD, Operation.ALL_TO_ALL], calls[GroupKind.DATA, Operation.ALL_GATHER])


@pytest.fixture(scope="module")
def expected() -> list[Answers]:
    return [one_rank_answers(CONFIG, prompts, GREEDY) if prompts else ([], []) for prompts in PROMPTS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_worker_answers_as_one_rank(rank_pool: RankPool, expected: list[Answers], layout: ParallelLayout, way: str) -> None:
    found = rank_pool.run(layout, answer_own, WAYS[way])
    for rank, ran in enumerate(found):
        answers, margins = expected[layout.place(rank).data]
        assert len(ran.answers) == len(answers)
        if answers:
            assert_answers(ran.answers, answers, margins)
    ((exchanges, agreements),) = {(ran.exchanges, ran.agreements) for ran in found}  # all ranks have met equally often
    # Of each step one agreement and one pass of the target, of each draft step one of each; in the end all agree that nobody goes on.
    num_draft_steps, num_steps = _solve(exchanges // 3, agreements - 1)
    assert exchanges == 3 * (NUM_MOE_LAYERS * num_steps + num_draft_steps)
    assert num_draft_steps >= num_steps > NUM_IDLE_STEPS


def _solve(passes: int, agreements: int) -> tuple[int, int]:
    """Draft steps and steps, from passes over layers of experts and agreements."""
    num_steps = (passes - agreements) // (NUM_MOE_LAYERS - 1)
    return agreements - num_steps, num_steps


def test_without_an_mtp_layer_every_worker_answers_as_one_rank(rank_pool: RankPool, expected: list[Answers]) -> None:
    layout = ParallelLayout(dp_size=2, is_expert_parallel=True)
    for worker, ran in enumerate(rank_pool.run(layout, answer_own, {}, config_of(TINY, max_drafts=0))):
        assert_answers(ran.answers, *expected[worker])


class Step(NamedTuple):
    """What came out of a step, and what it exchanged."""

    samples: Mapping[SequenceId, tuple[int, ...]]
    drafts: Mapping[SequenceId, tuple[int, ...]]
    is_idle: bool
    calls: Mapping[tuple[GroupKind, Operation], int]


def continue_after_hand_off(context: ParallelContext, workers: Sequence[int]) -> list[Step]:
    """The first worker goes on with a hidden state of another, from which it drafts before the step; the second with its own prompt, the
    third has nothing. Where one rank stands for all of `workers`, their results one after the other.
    """
    return [_continue_as(context, worker) for worker in workers or (context.place.data,)]


def _continue_as(context: ParallelContext, worker: int) -> Step:
    runtime = load_rank(context, CONFIG)
    runner = runtime.attach(PoolMemory(4, runtime.layout.block_bytes))
    name, table, prompt = SequenceId("a"), [BlockId(2), BlockId(1), BlockId(3)], make_prompt(80, worker)
    whole = SequenceSlice(sequence_id=name, tokens=prompt, start=0, block_table=table, sampling=GREEDY, keeps_hidden=True)
    first = runner.run(StepPlan(step_number=0, slices=(whole,)))
    row = SequenceSlice(
        sequence_id=name,
        tokens=first.samples[name],
        start=len(prompt),
        block_table=table,
        sampling=GREEDY,
        token_index=1,
        num_next_drafts=3 if worker == 0 else 1,
        seed_hidden=first.hidden_states[name] if worker == 0 else None,
        num_seed_drafts=2 if worker == 0 else 0,
    )
    context.meter.clear()
    result = runner.run(StepPlan(step_number=1, slices=(row,) if worker < 2 else ()))
    calls = dict(context.meter.calls)
    assert runner.run(StepPlan(step_number=2, slices=())).is_idle
    return Step(result.samples, result.drafts, result.is_idle, calls)


def test_drafts_of_a_hand_off_are_made_together(rank_pool: RankPool) -> None:
    size = 4
    layout = ParallelLayout(dp_size=size, is_expert_parallel=True)
    found = [step for (step,) in rank_pool.run(layout, continue_after_hand_off, (), timeout_s=60.0)]
    expected = continue_after_hand_off(one_rank(), range(size))
    assert [(step.samples, step.drafts) for step in found] == [(step.samples, step.drafts) for step in expected]
    assert len(found[0].drafts[SequenceId("a")]) == 3
    assert not any(step.is_idle for step in found)
    # Two draft steps before the step, three after it.
    calls = {(GroupKind.DATA, Operation.ALL_GATHER): 1 + 2 + 3, (GroupKind.WORLD, Operation.ALL_TO_ALL): 3 * (NUM_MOE_LAYERS + 2 + 3)}
    assert [step.calls for step in found] == [calls] * size
    assert expected[0].calls == {}, "alone nobody has to be asked"


def agree(context: ParallelContext) -> list[tuple[bool, ...]]:
    """Wishes of one rank, of another, of all, of none."""
    lock_step, number = LockStep(context.data), context.data.rank
    return [lock_step.anyone(number == 0, number == 1), lock_step.anyone(True), lock_step.anyone(False, False, number == 1)]


def test_what_one_worker_wishes_all_do(rank_pool: RankPool) -> None:
    agreed = [(True, True), (True,), (False, False, True)]
    assert rank_pool.run(ParallelLayout(dp_size=2, tp_size=2, is_expert_parallel=True), agree) == [agreed] * 4
    assert agree(one_rank()) == [(True, False), (True,), (False, False, False)]


def fail_on_one(context: ParallelContext, timeout_s: float) -> tuple[str, float]:
    """A step in which the second worker finds its cache damaged. Returns what each rank raised, and after how long."""
    store = serve_store("127.0.0.1", context.world.size, START_TIMEOUT_S) if context.rank == 0 else None
    port = int(context.world.broadcast_bytes(str(store.port).encode() if store is not None else b""))
    own = make_context(context.layout, context.rank, store or join_store("127.0.0.1", port, context.world.size, START_TIMEOUT_S), timeout_s)
    runtime = GlmRuntime.load(dataclasses.replace(CONFIG, parallel=own.layout), context=own)
    memory = PoolMemory(1, runtime.layout.block_bytes)
    memory.buffer[:] = bytes([0xFF if own.rank == 1 else 0]) * len(memory.buffer)
    row = SequenceSlice(sequence_id=SequenceId("a"), tokens=[3], start=9, block_table=[BlockId(0)], sampling=GREEDY)
    runner = runtime.attach(memory)
    context.world.barrier()
    started_at_s = time.monotonic()
    try:
        runner.run(StepPlan(step_number=0, slices=(row,)))
        raised = "nothing"
    except (EngineFault, RuntimeError) as error:
        raised = type(error).__name__
    took_s = time.monotonic() - started_at_s
    context.world.barrier()  # until all have ended nobody leaves, which the others would notice
    return raised, took_s


def test_a_worker_s_fault_holds_others_up_for_one_exchange_at_most(rank_pool: RankPool) -> None:
    timeout_s = 2.0
    (waited, waited_s), (faulted, _) = rank_pool.run(ParallelLayout(dp_size=2, is_expert_parallel=True), fail_on_one, timeout_s)
    assert (faulted, waited) == ("EngineFault", "RuntimeError")
    assert waited_s < timeout_s + 3.0
