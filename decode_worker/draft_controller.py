"""Keeps the number of drafts that pays: counts what holds, measures what steps cost, and asks now and then.

Knows: when to ask again. Does not know the rules (`glm_runtime.engine.draft_budget`, `draft_stop`). One loop owns it; time is passed in.
"""

from glm_runtime.engine.draft_budget import choose_draft_budget
from glm_runtime.engine.draft_meter import DraftMeter, SpeculationMeter
from glm_runtime.engine.draft_stop import StopRule, make_stop_rule
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_plan import StepPlan, StepResult

STEPS_BETWEEN_CHOICES = 16
"""While about as many sequences decode; what a draft is worth depends on their number first."""
STEPS_BETWEEN_MEASUREMENTS = 5
"""Of costs, which change slowly. Not a divisor of the other: a step that chooses is not measured each time."""
STEPS_BETWEEN_PROBES = 256
"""While nothing is drafted, one step in so many drafts one token: else nobody would notice that drafting pays again."""


class DraftController:
    """num_drafts: what each sequence should verify in its next step, and what should be made for it. stop_rule: when to make fewer."""

    def __init__(self, model: LoadedModel) -> None:
        self.num_drafts = model.max_drafts
        self.meter = DraftMeter()
        self._max_drafts = model.max_drafts
        self._adapts = model.adapts_drafts
        self._measures = model.adapts_drafts and model.max_drafts > 0
        self._costs = SpeculationMeter(model.measured_costs)
        self._chosen = model.max_drafts
        self._num_steps = 0
        self._next_choice = 0
        self._size_of_choice = -1
        least = model.min_draft_probability
        self.stop_rule = StopRule(row=least) if least else None
        self._prices_rule = model.adapts_drafts and least is None

    def choose(self, num_sequences: int) -> None:
        """A step with so many decoding sequences is about to be planned."""
        if not self._adapts or not self._max_drafts or not num_sequences:
            return
        size = (num_sequences - 1).bit_length()  # the bucket that costs are kept in
        if self._num_steps >= self._next_choice or size != self._size_of_choice:
            self._next_choice, self._size_of_choice = self._num_steps + STEPS_BETWEEN_CHOICES, size
            acceptance, made, costs = self.meter.acceptance, self.meter.made, self._costs.costs()
            self._chosen = choose_draft_budget(
                acceptance, costs, num_sequences=num_sequences, current=self._chosen, max_drafts=self._max_drafts, made=made
            )
            if self._prices_rule:
                self.stop_rule = make_stop_rule(acceptance, made, costs, num_sequences=num_sequences, num_drafts=self._chosen)
        # Made in one step, verified in the next: a probe is two steps long.
        is_probe = self._chosen == 0 and self._num_steps % STEPS_BETWEEN_PROBES < 2
        self.num_drafts = 1 if is_probe else self._chosen

    def take(self, plan: StepPlan, result: StepResult, step_s: float, num_rows: int) -> None:
        """A step of `num_rows` rows has returned after `step_s` seconds.

        num_rows: 0 where it had prompt chunks; such a step says nothing about decoding.
        """
        self._num_steps += 1
        if plan.stop_rule is not None and result.drafts:
            self.meter.count_made(map(len, result.drafts.values()), self._num_next_drafts(plan))
        if self._measures and num_rows and self._num_steps % STEPS_BETWEEN_MEASUREMENTS == 0:
            num_next_drafts = self._num_next_drafts(plan)
            self._costs.take(
                num_rows=num_rows,
                num_sequences=len(plan.slices),
                num_drafts=result.num_draft_steps if result.num_draft_steps or not result.drafts else num_next_drafts,
                target_s=result.target_s,
                draft_s=result.draft_s,
                step_s=step_s,
            )

    def _num_next_drafts(self, plan: StepPlan) -> int:
        """The most that a sequence of the step was to make; that of the oldest, unless its end is near."""
        first = plan.slices[0].num_next_drafts if plan.slices else 0
        return first if first == self.num_drafts else max([piece.num_next_drafts for piece in plan.slices], default=0)
