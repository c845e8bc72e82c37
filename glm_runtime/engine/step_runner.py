"""The seam between those who decide steps and those who compute them."""

from typing import Protocol

from glm_runtime.engine.step_plan import StepPlan, StepResult

EMPTY_PLAN = StepPlan(step_number=0, slices=())
"""The step of a worker that has nothing to compute."""


class StepRunner(Protocol):
    """What a worker asks of a model: `ModelRunner`, `GroupRunner` for several ranks, or a toy in tests."""

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`."""


def run_empty_steps(runner: StepRunner) -> None:
    """Have nothing more to compute, and serve the other workers of the replica until that is so for all of them.

    Where there are none, that is at once.
    """
    while not runner.run(EMPTY_PLAN).is_idle:
        pass
