"""What drafting is measured to give and to cost. Time is passed in."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from glm_runtime.engine.calibration import LEAST_COST_S, MeasuredCosts
from glm_runtime.engine.draft_budget import CostCurve, StepCosts
from glm_runtime.runtime_config import MOST_DRAFTS

FIRST_ACCEPTANCE = 0.84
"""Share of first drafts that hold, as published for GLM-5.2 on code: assumed before anything is measured."""
PRIOR_DRAFTS = 8.0
"""How many drafts an assumption counts for."""
FORGETTING = 0.995
"""Weight of a count after one more sequence and step: some 200 are remembered."""
SMOOTHING = 0.2
"""Weight of the newest step in the cost of its own size; half of it moves the other sizes along: a longer context slows all."""


class DraftMeter:
    """Counts are kept by (drafted, accepted) until somebody asks: there is one for each sequence of each step."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._waiting_made: Counter[tuple[int, int]] = Counter()
        self._drafted = [0] * MOST_DRAFTS
        self._accepted = [0] * MOST_DRAFTS
        self._recent_drafted = [0.0] * MOST_DRAFTS
        self._recent_accepted = [0.0] * MOST_DRAFTS
        self._recent_wanted = [0.0] * MOST_DRAFTS
        self._recent_made = [0.0] * MOST_DRAFTS

    def count(self, *, num_drafted: int, num_accepted: int) -> None:
        """One sequence's part of one step."""
        if num_drafted:
            self._waiting[num_drafted, num_accepted + 1] += 1

    def count_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Many sequences' parts of one step: how many drafts each had, and how many tokens it has got, which is one more than held."""
        self._waiting.update(runs)

    def count_made(self, lengths: Iterable[int], num_wanted: int) -> None:
        """What one step has made of drafts: how many for each sequence, of `num_wanted`. Only asked for where drafting stops early."""
        self._waiting_made.update(zip(lengths, repeat(num_wanted)))

    @property
    def made(self) -> tuple[float, ...]:
        """Share of the sequences that made a draft, by position; all of them where nothing is known, and never more than before it."""
        waiting, self._waiting_made = self._waiting_made, Counter()
        kept = FORGETTING ** waiting.total()
        num_positions = max([num_wanted for _, num_wanted in waiting], default=0)
        for position in range(num_positions):
            self._recent_wanted[position] *= kept
            self._recent_made[position] *= kept
        for (length, num_wanted), count in waiting.items():
            for position in range(num_wanted):
                self._recent_wanted[position] += count
                self._recent_made[position] += count if position < length else 0
        return _shares(self._recent_wanted, self._recent_made, 1.0)

    @property
    def drafted(self) -> list[int]:
        """Over all steps so far, drafts at each position of their step."""
        self._fold()
        return self._drafted

    @property
    def accepted(self) -> list[int]:
        """Those of them that held."""
        self._fold()
        return self._accepted

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, Counter()
        kept = FORGETTING ** sum([count for (num_drafted, _), count in waiting.items() if num_drafted])
        self._recent_drafted = [count * kept for count in self._recent_drafted]
        self._recent_accepted = [count * kept for count in self._recent_accepted]
        for (num_drafted, num_drawn), count in waiting.items():
            for position in range(num_drafted):
                held = count if position < num_drawn - 1 else 0
                self._drafted[position] += count
                self._accepted[position] += held
                self._recent_drafted[position] += count
                self._recent_accepted[position] += held

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of recent drafts that held, by position; never more than at the position before.

        A position that is not drafted is forgotten, and then assumed to lose the share that the one before it loses: so it is tried
        again when the earlier ones do well.
        """
        self._fold()
        return _shares(self._recent_drafted, self._recent_accepted, FIRST_ACCEPTANCE)


def _shares(numbers: Sequence[float], counted: Sequence[float], first: float) -> tuple[float, ...]:
    shares: list[float] = []
    before, assumed = 1.0, first
    for number, count in zip(numbers, counted, strict=True):
        share = min((count + PRIOR_DRAFTS * assumed) / (number + PRIOR_DRAFTS), before)
        shares.append(share)
        before, assumed = share, share * (share / before if before else 0.0)
    return tuple(shares)


class CostMeter:
    """A smoothed cost by size, each size in the bucket of the power of two that holds it; never below `LEAST_COST_S`."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._seconds: dict[int, float] = {}
        for size, seconds in (measured or {}).items():
            self.take(size, seconds)

    def take(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        seconds = max(seconds, LEAST_COST_S)
        bucket = 1 << (size - 1).bit_length()
        known = self._seconds.get(bucket)
        if known is None:
            self._seconds[bucket] = seconds
            return
        change = min(max(seconds / known, 0.5), 2.0) - 1.0  # one step that was held up says little
        self._seconds = {
            at: max(value * (1.0 + SMOOTHING * change * (1.0 if at == bucket else 0.5)), LEAST_COST_S)
            for at, value in self._seconds.items()
        }

    def curve(self) -> CostCurve:
        """What is known now."""
        return CostCurve(tuple(sorted(self._seconds.items())))


class SpeculationMeter:
    """Everything that the choice of a number of drafts looks at."""

    def __init__(self, measured: MeasuredCosts | None = None) -> None:
        measured = measured or MeasuredCosts()
        self._target = CostMeter(measured.target)
        self._first = CostMeter(measured.first)
        self._further = CostMeter(measured.further)
        self._overhead_s = 0.0

    def take(self, *, num_rows: int, num_sequences: int, num_drafts: int, target_s: float, draft_s: float, step_s: float) -> None:
        """A step of decode rows alone. num_drafts: made for the next step by each sequence; step_s: all of it."""
        first_s, further_s = self._first.curve().seconds(num_sequences), self._further.curve().seconds(num_sequences)
        expected_s = first_s + max(num_drafts - 1, 0) * further_s
        # What was seen is the sum of both kinds of draft step: each moves by the same share, or gets an equal one at first.
        share = draft_s / expected_s if expected_s else draft_s / max(num_drafts, 1)
        self._target.take(num_rows, target_s)
        self._first.take(num_sequences, (first_s or 1.0) * share)
        self._further.take(num_sequences, (further_s or 1.0) * share)
        self._overhead_s += SMOOTHING * (max(step_s - target_s - draft_s, 0.0) - self._overhead_s)

    def costs(self) -> StepCosts:
        """What is known now."""
        return StepCosts(target=self._target.curve(), first=self._first.curve(), further=self._further.curve(), overhead_s=self._overhead_s)
