"""Measures, before anybody is served, what steps of several sizes cost: the first guess at how many drafts pay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters

SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 2
FURTHER_DRAFTS = 3
LONGEST_STEP_S = 0.25
"""Larger steps than one that takes this long are not tried; what they cost shows when they are served."""


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


def measure_costs(runner: _Runner, *, num_blocks: int, max_step_tokens: int) -> MeasuredCosts:
    """Decode steps of one row a sequence, each sequence in a block of its own; nobody may own a block yet. Bounded in time."""
    target: dict[int, float] = {}
    first: dict[int, float] = {}
    further: dict[int, float] = {}
    for size in SIZES:
        if size > min(num_blocks, max_step_tokens) or max(target.values(), default=0.0) > LONGEST_STEP_S:
            break
        short = [runner.run(_plan(size, 1)) for _ in range(REPEATS)]
        long = [runner.run(_plan(size, 1 + FURTHER_DRAFTS)) for _ in range(REPEATS)]
        target[size] = min(result.target_s for result in (*short, *long))
        first[size] = min(result.draft_s for result in short)
        further[size] = max(min(result.draft_s for result in long) - first[size], 0.0) / FURTHER_DRAFTS
    return MeasuredCosts(target=target, first=first, further=further)


def _plan(num_sequences: int, num_drafts: int) -> StepPlan:
    sampling = SamplingParameters(max_tokens=2, seed=0, temperature=0.0)
    slices = tuple(
        SequenceSlice(
            sequence_id=SequenceId(f"calibration-{number}"),
            tokens=(0,),
            start=0,
            block_table=(BlockId(number),),
            sampling=sampling,
            num_next_drafts=num_drafts,
        )
        for number in range(num_sequences)
    )
    return StepPlan(step_number=0, slices=slices)
