"""The prefill worker's dials."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How much a prefill worker takes on, and in which order.

    max_waiting: requests in the queue; START_SOURCE beyond it fails as retryable elsewhere.
    max_computing: prompts that are computed side by side in chunks.
    priority_weight_s: how much later a request counts as arrived for each level of (weaker, larger) priority.
    """

    max_waiting: int = 256
    max_computing: int = 16
    priority_weight_s: float = 5.0
    tick_interval_s: float = 0.25
    drain_timeout_s: float = 120.0
    stop_timeout_s: float = 5.0
