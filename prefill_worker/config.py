"""The prefill worker's dials."""

from dataclasses import dataclass, field

from glm_runtime.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How much a prefill worker takes on, and in which order.

    max_waiting: requests in the queue; START_SOURCE beyond it fails as retryable elsewhere.
    max_computing: prompts that are computed side by side in chunks.
    priority_weight_s: how much later a request counts as arrived for each level of (weaker, larger) priority.
    tick_interval_s: how often timers are looked at. step_timeout_s: a step that takes longer is hung and ends the worker.
    stop_timeout_s: how long stopping waits for each part, the step in flight among them.
    parallel: how one worker is cut into ranks.
    """

    max_waiting: int = 256
    max_computing: int = 16
    priority_weight_s: float = 5.0
    tick_interval_s: float = 0.1
    step_timeout_s: float = 120.0
    stop_timeout_s: float = 5.0
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
