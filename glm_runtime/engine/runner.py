"""Executes step plans on the model: the only caller of the forward pass in serving."""

from glm_runtime.engine.step_plan import StepPlan, StepResult


class ModelRunner:
    """The model bound to one pool of blocks. Blocking; called from one thread (the worker's engine thread).

    Made by `GlmRuntime.attach`. `run` may be called while other threads read or write blocks that the plan does not name.
    """

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, store their keys in the cache, and draw the tokens it asks for.

        When it returns, every store into the plan's blocks is complete. Raises AssertionError for a plan that breaks the rules of
        `SequenceSlice`; an empty plan returns an empty result.
        """
        raise NotImplementedError
