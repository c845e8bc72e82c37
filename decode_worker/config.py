"""The decode worker's dials."""

from dataclasses import dataclass, field

from glm_runtime.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How much a decode worker takes on, and how it shares a step.

    max_running: sequences that hold blocks here at once, running or being filled; OPEN_SINK beyond it is answered BUSY.
    max_chunk_tokens: tokens of prompts that a step computes beside decoding rows; bounds how long a local prefill delays them.
    busy_retry_after_s: what BUSY tells the router to wait.
    tick_interval_s: how often timers are looked at. step_timeout_s: a step that takes longer is hung and ends the worker.
    stop_timeout_s: how long stopping waits for each part, the step in flight among them.
    parallel: how one worker is cut into ranks.
    """

    max_running: int = 64
    max_chunk_tokens: int = 256
    busy_retry_after_s: float = 0.2
    tick_interval_s: float = 0.1
    step_timeout_s: float = 120.0
    stop_timeout_s: float = 5.0
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
