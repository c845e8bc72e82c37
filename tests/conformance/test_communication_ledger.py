"""What ranks have counted in one step, against what the planner says for it."""

import pytest

from cluster.planner.communication import StepRows, Traffic, step_traffic
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.runtime import GlmRuntime
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import config_of, load_rank
from tests.rank_pool import RankPool

Counts = dict[tuple[GroupKind, Operation], tuple[int, int]]
CONFIG = config_of(TINY)
GREEDY = SamplingParameters(max_tokens=90, seed=0, temperature=0.0)
DRAWN = SamplingParameters(max_tokens=90, seed=3, temperature=0.7)
NUM_BEFORE = 150
"""Beyond the 64 tokens that the indexer selects."""


def counted(context: ParallelContext, num_drafts: int, sampling: SamplingParameters) -> tuple[Counts, tuple[int, ...], int]:
    """One decode step of two sequences with drafts: what was exchanged, the rows that stand, and draft steps."""
    runtime = load_rank(context, CONFIG)
    homes = context.layout.dcp_size
    runner = runtime.attach(PoolMemory(16, runtime.layout.block_bytes))
    tables = {
        name: [BlockId(block * homes + place % homes) for place, block in enumerate(blocks)]
        for name, blocks in {"a": (1, 3, 4), "b": (7, 2, 5)}.items()
    }
    prompts = {name: make_prompt(NUM_BEFORE, number) for number, name in enumerate(tables)}
    pieces = [
        SequenceSlice(sequence_id=SequenceId(name), tokens=prompt[:-1], start=0, block_table=tables[name], next_token=prompt[-1])
        for name, prompt in prompts.items()
    ]
    runner.run(StepPlan(step_number=0, slices=tuple(pieces)))
    drafts = [5] * num_drafts
    steps = [
        SequenceSlice(
            sequence_id=SequenceId(name), tokens=[prompt[-1], *drafts], start=NUM_BEFORE - 1, block_table=tables[name], sampling=sampling,
            num_drafts=num_drafts, num_next_drafts=3,
        )
        for name, prompt in prompts.items()
    ]  # fmt: skip
    context.meter.clear()
    result = runner.run(StepPlan(step_number=1, slices=tuple(steps)))
    meter = context.meter
    return (
        {key: (calls, meter.bytes_sent[key]) for key, calls in meter.calls.items()},
        tuple(len(run) for run in result.samples.values()),
        result.num_draft_steps,
    )


LAYOUTS = [
    ParallelLayout(tp_size=2),
    ParallelLayout(tp_size=4, replicates_embedding=True),
    ParallelLayout(tp_size=2, is_expert_parallel=True),
    ParallelLayout(tp_size=2, dcp_size=2),
    ParallelLayout(tp_size=2, dcp_size=2, dcp_combine="ag_rs", replicates_queries=False),
    ParallelLayout(pcp_size=2),
    ParallelLayout(pcp_size=2, tp_size=2),
    ParallelLayout(pcp_size=2, is_expert_parallel=True),
    ParallelLayout(dp_size=2, is_expert_parallel=True),
    ParallelLayout(dp_size=2, tp_size=2, is_expert_parallel=True),
]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_a_step_exchanges_what_the_planner_says(rank_pool: RankPool, layout: ParallelLayout, sampling: SamplingParameters) -> None:
    num_drafts = 2
    found, standing, num_draft_steps = rank_pool.run(layout, counted, num_drafts, sampling)[0]
    rows = StepRows(
        rows=(1 + num_drafts,) * 2, num_scored=2 * (1 + num_drafts), num_drawn=2 * (1 + num_drafts), num_asking=2,
        needs_logits=sampling is DRAWN, num_drafted=2 * num_drafts, mtp_rows=standing, num_mtp_scored=sum(standing), num_drafting=2,
        num_draft_steps=num_draft_steps,
    )  # fmt: skip
    runtime = GlmRuntime.load(CONFIG)
    said = step_traffic(runtime.config, layout, rows, runtime.layout, item_bytes=4)
    for key in found.keys() | said.keys():
        calls, sent = found.get(key, (0, 0))
        expected = said.get(key, Traffic())
        assert calls == expected.calls, key
        if key == (GroupKind.WORLD, Operation.ALL_TO_ALL):  # which experts rows choose is theirs; at most one copy a rank
            assert 0 < sent < 3 * expected.bytes_sent
        else:
            assert sent == expected.bytes_sent, key
