"""Measured speed of a worker's steps, smoothed. Time is passed in."""

SMOOTHING = 0.2
"""Weight of the newest step: a change of load shows after about five steps."""


class StepMeter:
    """Counts steps and keeps moving averages of how long one takes and how many prompt tokens it computes in a second."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._started_s = 0.0

    def start(self, now_s: float) -> int:
        """A step begins; returns its number, counted from 1."""
        self._started_s = now_s
        self.num_steps += 1
        return self.num_steps

    def end(self, num_prefill_tokens: int, now_s: float) -> float:
        """The step has returned; how long it took. One without prompt tokens says nothing about the speed of prefill."""
        took_s = max(now_s - self._started_s, 1e-9)
        self.step_s = _smoothed(self.step_s, took_s)
        if num_prefill_tokens:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, num_prefill_tokens / took_s)
        return took_s


def _smoothed(average: float, value: float) -> float:
    return value if average == 0.0 else average + SMOOTHING * (value - average)
