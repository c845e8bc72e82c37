"""How many drafts pay. Pure: measured acceptance, measured costs and the batch in, a number out.

With k drafts a sequence gets 1 + A_1 + ... + A_k tokens a step, A_j being the share of drafts at position j that hold. The step costs a
target forward over 1 + k rows a sequence, and k draft steps. Few rows more are nearly free while a step is bound by reading weights or
by its own overhead, and dear once it is bound by arithmetic or each row wakes other experts; so the best k falls with the batch.

Where drafting stops early (`draft_stop.py`), only a share M_j of the sequences makes a draft at position j: a sequence then gets
1 + A_1 M_1 + ... + A_k M_k tokens of 1 + M_1 + ... + M_k rows. No shares given means all of them.
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

    def step_s(self, num_sequences: int, num_drafts: int, made: Sequence[float] = ()) -> float:
        """One step with `num_drafts` drafts for each sequence. Without drafts the layer's keys still are computed, by draft step 0."""
        rows = num_sequences * (1.0 + (sum(made[:num_drafts]) if made else num_drafts))
        return self.overhead_s + self.target.seconds(rows) + self.draft_s(num_sequences, num_drafts, made)

    def draft_s(self, num_sequences: int, num_drafts: int, made: Sequence[float] = ()) -> float:
        """The draft steps of one step. Each is made as long as one sequence goes on, at most with the sum of their chances to."""
        num_further = max(num_drafts - 1, 0)
        num_made = sum([min(num_sequences * share, 1.0) for share in made[:num_further]]) if made else num_further
        return self.first.seconds(num_sequences) + num_made * self.further.seconds(num_sequences)


def expected_tokens(acceptance: Sequence[float], num_drafts: int, made: Sequence[float] = ()) -> float:
    """Tokens that a sequence gets of a step."""
    if made:
        return 1.0 + sum([held * share for held, share in zip(acceptance[:num_drafts], made, strict=False)])
    return 1.0 + sum(acceptance[:num_drafts])


def choose_draft_budget(
    acceptance: Sequence[float], costs: StepCosts, *, num_sequences: int, current: int, max_drafts: int, made: Sequence[float] = ()
) -> int:
    """Drafts of each sequence in the next step, 0 to `max_drafts`: the fastest, unless it beats `current` by less than the hysteresis.

    acceptance: share that holds of the drafts made at each position. made: share of the sequences that make one there.
    """
    speeds = [
        expected_tokens(acceptance, drafts, made) / max(costs.step_s(num_sequences, drafts, made), 1e-9) for drafts in range(max_drafts + 1)
    ]
    best = max(range(max_drafts + 1), key=lambda drafts: speeds[drafts])
    kept = min(current, max_drafts)
    return best if speeds[best] > speeds[kept] * (1 + HYSTERESIS) else kept
