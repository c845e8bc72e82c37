"""The seam between those who decide steps and those who compute them."""

from typing import Protocol

from glm_runtime.engine.step_plan import StepPlan, StepResult


class StepRunner(Protocol):
    """What a worker asks of a model: `ModelRunner`, `GroupRunner` for several ranks, or a toy in tests."""

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`."""
