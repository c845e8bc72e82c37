"""Measures, before anybody is served, what steps of several sizes cost: the first guess at how many drafts pay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.parallel.decode_context import group_block
from kv_transfer.identity import SequenceId
from kv_transfer.messages import SamplingParameters

SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 2
FURTHER_DRAFTS = 3
LONGEST_STEP_S = 0.25
"""Larger steps than one that takes this long are not tried; what they cost shows when they are served."""
LEAST_COST_S = 1e-6
"""No step is thought to cost less: differences of noisy times come out as nothing, and ratios to nothing say nothing."""


class _Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCosts:
    """Seconds, the least of some repeats. target: of a target forward, by rows. first, further: of draft step 0 and of each after it, by
    sequences.
    """

    target: Mapping[int, float] = field(default_factory=dict)
    first: Mapping[int, float] = field(default_factory=dict)
    further: Mapping[int, float] = field(default_factory=dict)


def measure_costs(runner: _Runner, *, num_blocks: int, max_step_tokens: int, num_homes: int = 1) -> MeasuredCosts:
    """Decode steps of one row a sequence, each sequence in a block of its own; nobody may own a block yet. Bounded in time.

    num_homes: ranks that share a cache and the blocks; each sequence's only block is the first's.
    """
    target: dict[int, float] = {}
    first: dict[int, float] = {}
    further: dict[int, float] = {}
    for size in SIZES:
        if size > min(num_blocks // num_homes, max_step_tokens) or max(target.values(), default=0.0) > LONGEST_STEP_S:
            break
        for num_drafts in (1, 1 + FURTHER_DRAFTS):
            runner.run(_plan(size, num_drafts, num_homes))  # the first of a size makes its buffers
        short = [runner.run(_plan(size, 1, num_homes)) for _ in range(REPEATS)]
        long = [runner.run(_plan(size, 1 + FURTHER_DRAFTS, num_homes)) for _ in range(REPEATS)]
        target[size] = max(min(result.target_s for result in (*short, *long)), LEAST_COST_S)
        first[size] = max(min(result.draft_s for result in short), LEAST_COST_S)
        further[size] = max((min(result.draft_s for result in long) - first[size]) / FURTHER_DRAFTS, LEAST_COST_S)
    return MeasuredCosts(target=target, first=first, further=further)


def _plan(num_sequences: int, num_drafts: int, num_homes: int) -> StepPlan:
    sampling = SamplingParameters(max_tokens=2, seed=0, temperature=0.0)
    slices = tuple(
        SequenceSlice(
            sequence_id=SequenceId(f"calibration-{number}"),
            tokens=(0,),
            start=0,
            block_table=(group_block(number, 0, num_homes),),
            sampling=sampling,
            num_next_drafts=num_drafts,
        )
        for number in range(num_sequences)
    )
    return StepPlan(step_number=0, slices=slices)
