"""How many drafts pay. Pure: measured acceptance, measured costs and the batch in, a number out.

With k drafts a sequence gets 1 + A_1 + ... + A_k tokens a step, A_j being the share of drafts at position j that hold. The step costs a
target forward over 1 + k rows a sequence, and k draft steps. Few rows more are nearly free while a step is bound by reading weights or
by its own overhead, and dear once it is bound by arithmetic or each row wakes other experts; so the best k falls with the batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

HYSTERESIS = 0.05
"""Share by which another number must be faster than the present one: measurements of single steps scatter by as much."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Measured seconds by size, sizes ascending and all above 0. Straight between the points and beyond the last; flat before the first."""

    points: tuple[tuple[int, float], ...]

    def seconds(self, size: float) -> float:
        """At any size; 0 where nothing was measured."""
        if not self.points:
            return 0.0
        place = bisect_left(self.points, (size,))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points) == 1:
            return self.points[0][1] * size / self.points[0][0]
        (left, left_s), (right, right_s) = self.points[min(place, len(self.points) - 1) - 1 : min(place, len(self.points) - 1) + 1]
        slope = max(right_s - left_s, 0.0) / (right - left)
        return left_s + slope * (size - left)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """target: a target forward by rows. first, further: draft step 0, which has an indexer's work and several rows a sequence, and each
    after it, by sequences. overhead_s: what a step costs beside all that.
    """

    target: CostCurve
    first: CostCurve
    further: CostCurve
    overhead_s: float = 0.0

    def step_s(self, num_sequences: int, num_drafts: int) -> float:
        """One step with `num_drafts` drafts for each sequence. Without drafts the layer's keys still are computed, by draft step 0."""
        return self.overhead_s + self.target.seconds(num_sequences * (1 + num_drafts)) + self.draft_s(num_sequences, num_drafts)

    def draft_s(self, num_sequences: int, num_drafts: int) -> float:
        """The draft steps of one step."""
        return self.first.seconds(num_sequences) + max(num_drafts - 1, 0) * self.further.seconds(num_sequences)


def expected_tokens(acceptance: Sequence[float], num_drafts: int) -> float:
    """Tokens that a sequence gets of a step."""
    return 1.0 + sum(acceptance[:num_drafts])


def choose_draft_budget(acceptance: Sequence[float], costs: StepCosts, *, num_sequences: int, current: int, max_drafts: int) -> int:
    """Drafts of each sequence in the next step, 0 to `max_drafts`: the fastest, unless it beats `current` by less than the hysteresis."""
    speeds = [expected_tokens(acceptance, drafts) / max(costs.step_s(num_sequences, drafts), 1e-9) for drafts in range(max_drafts + 1)]
    best = max(range(max_drafts + 1), key=lambda drafts: speeds[drafts])
    kept = min(current, max_drafts)
    return best if speeds[best] > speeds[kept] * (1 + HYSTERESIS) else kept
