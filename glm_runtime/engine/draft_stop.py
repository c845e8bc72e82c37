"""When drafting stops before the number of drafts that the batch has. Pure: probabilities and measured costs in, a decision out.

A draft holds at most as often as all drafts of its step up to it: that product of the MTP layer's own probabilities is its chance. It
is compared with what its row and the next draft step would bring elsewhere: seconds times the tokens a second that the step has anyway.

Drafts that are drawn must never be left out for what they are: that would change what is put out (`sampling/ratio_test.py`). Their rows
come with chance 1 (`draft_run.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glm_runtime.engine.draft_budget import StepCosts, expected_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Both in tokens. row: what a draft must be expected to bring for its row to be verified. step: what all those that go on must bring
    beyond their rows for one more draft step.
    """

    row: float
    step: float = 0.0


def make_stop_rule(
    acceptance: Sequence[float], made: Sequence[float], costs: StepCosts, *, num_sequences: int, num_drafts: int
) -> StopRule | None:
    """The prices at the speed that `num_drafts` drafts are measured to give; None where there is nothing to stop or nothing is known.

    acceptance, made: as `choose_draft_budget` takes them.
    """
    step_s = costs.step_s(num_sequences, num_drafts, made)
    if num_drafts == 0 or num_sequences == 0 or step_s <= 0.0:
        return None
    tokens_per_s = expected_tokens(acceptance, num_drafts, made) * num_sequences / step_s
    rows_s = costs.target.seconds(num_sequences * (1 + num_drafts)) - costs.target.seconds(num_sequences)
    row_s = max(rows_s, 0.0) / (num_sequences * num_drafts)
    return StopRule(row=row_s * tokens_per_s, step=costs.further.seconds(num_sequences) * tokens_per_s)


def is_kept(rule: StopRule, chances: Sequence[float]) -> list[bool]:
    """Which of the newest drafts are verified. chances: of each to hold, with all before it. The others have drafted their last."""
    return [chance >= rule.row for chance in chances]


def pays_another_step(rule: StopRule, chances: Sequence[float]) -> bool:
    """Whether one more draft step is made. chances: of those that would go on, at most what their next drafts have."""
    return sum([chance - rule.row for chance in chances]) > rule.step
