"""How many drafts pay: a table, hysteresis, and what the meters make of measurements."""

import pytest

from glm_runtime.engine import calibration
from glm_runtime.engine.calibration import MeasuredCosts
from glm_runtime.engine.draft_budget import CostCurve, StepCosts, choose_draft_budget, expected_tokens
from glm_runtime.engine.draft_meter import CostMeter, DraftMeter, SpeculationMeter
from glm_runtime.engine.step_plan import StepPlan, StepResult

FLAT = CostCurve(((1, 0.020), (512, 0.020)))
"""Bound by reading weights that are read anyway."""
LINEAR = CostCurve(((1, 0.001), (512, 0.512)))
"""Bound by arithmetic."""
KNEE = CostCurve(((1, 0.020), (64, 0.021), (128, 0.040), (512, 0.160)))
"""Both, as on every device."""
CHEAP = CostCurve(((1, 0.0005), (64, 0.0005)))
DEAR = CostCurve(((1, 0.010), (64, 0.010)))
GOOD = (0.9, 0.84, 0.69, 0.57, 0.48, 0.4, 0.3, 0.2)
BAD = (0.2, 0.04, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)
NEVER = (0.0,) * 8
PUBLISHED = (0.84, 0.66, 0.49, 0.34, 0.28, 0.17, 0.13, 0.11)
"""For GLM-5.2 on code."""


@pytest.mark.parametrize(
    ("acceptance", "target", "draft", "num_sequences", "expected"),
    [
        (GOOD, FLAT, CHEAP, 1, 8),
        (GOOD, FLAT, CHEAP, 32, 8),
        (GOOD, FLAT, DEAR, 1, 3),
        (GOOD, LINEAR, CHEAP, 16, 0),
        (GOOD, KNEE, CHEAP, 1, 8),
        (GOOD, KNEE, CHEAP, 16, 3),
        (GOOD, KNEE, CHEAP, 64, 0),
        (BAD, FLAT, CHEAP, 1, 1),
        (BAD, FLAT, DEAR, 1, 1),
        (NEVER, FLAT, CHEAP, 1, 0),
        (PUBLISHED, KNEE, CHEAP, 8, 7),
    ],
)
def test_the_fastest_number(acceptance: tuple[float, ...], target: CostCurve, draft: CostCurve, num_sequences: int, expected: int) -> None:
    costs = StepCosts(target=target, first=draft, further=draft)
    speeds = [expected_tokens(acceptance, drafts) / costs.step_s(num_sequences, drafts) for drafts in range(9)]
    chosen = choose_draft_budget(acceptance, costs, num_sequences=num_sequences, current=expected, max_drafts=8)
    assert chosen == expected
    assert speeds[chosen] * 1.05 >= max(speeds)


@pytest.mark.parametrize("current", range(9))
def test_whatever_the_present_number_the_next_is_within_the_hysteresis_of_the_best(current: int) -> None:
    for acceptance in (GOOD, BAD, NEVER, PUBLISHED):
        for target in (FLAT, LINEAR, KNEE):
            costs = StepCosts(target=target, first=CHEAP, further=CHEAP, overhead_s=0.001)
            speeds = [expected_tokens(acceptance, drafts) / costs.step_s(16, drafts) for drafts in range(6)]
            chosen = choose_draft_budget(acceptance, costs, num_sequences=16, current=current, max_drafts=5)
            assert 0 <= chosen <= 5
            assert speeds[chosen] * 1.0501 >= max(speeds)


def test_a_small_gain_changes_nothing() -> None:
    costs = StepCosts(target=FLAT, first=CHEAP, further=CHEAP)
    assert choose_draft_budget((0.5, 0.02), costs, num_sequences=1, current=1, max_drafts=2) == 1
    assert choose_draft_budget((0.5, 0.02), costs, num_sequences=1, current=2, max_drafts=2) == 2


def test_a_curve_is_straight_between_its_points_and_beyond_them() -> None:
    assert [KNEE.seconds(size) for size in (0.5, 1, 64, 96, 128)] == pytest.approx([0.020, 0.020, 0.021, 0.0305, 0.040])
    assert KNEE.seconds(1024) == pytest.approx(0.320)
    assert CostCurve(()).seconds(7) == 0.0
    assert CostCurve(((4, 0.004),)).seconds(8) == pytest.approx(0.008)
    assert CostCurve(((4, 0.004),)).seconds(2) == pytest.approx(0.004)


def test_counts_by_position() -> None:
    meter = DraftMeter()
    for num_accepted in (3, 0, 5, 5):
        meter.count(num_drafted=5, num_accepted=num_accepted)
    meter.count(num_drafted=1, num_accepted=1)
    meter.count(num_drafted=0, num_accepted=0)
    assert meter.drafted == [5, 4, 4, 4, 4, 0, 0, 0]
    assert meter.accepted == [4, 3, 3, 2, 2, 0, 0, 0]


def test_acceptance_starts_as_assumed_and_follows_what_is_seen() -> None:
    meter = DraftMeter()
    assert meter.acceptance == pytest.approx([0.84**position for position in range(1, 9)])
    for _ in range(2000):
        meter.count(num_drafted=5, num_accepted=2)
    assert min(meter.acceptance[:2]) > 0.99
    assert max(meter.acceptance[2:]) < 0.05
    for _ in range(2000):
        meter.count(num_drafted=1, num_accepted=0)
    assert max(meter.acceptance) < 0.05


def test_a_position_that_is_not_drafted_is_judged_by_those_before_it() -> None:
    meter = DraftMeter()
    for number in range(2000):
        meter.count(num_drafted=3, num_accepted=3 if number % 10 else 0)
    assert meter.acceptance[:3] == pytest.approx((0.9, 0.9, 0.9), abs=0.02)
    assert min(meter.acceptance) > 0.8, "earlier ones lose nothing, so later ones may be worth a try"
    for number in range(2000):
        meter.count(num_drafted=3, num_accepted=number % 4)
    assert meter.acceptance[:3] == pytest.approx((0.75, 0.5, 0.25), abs=0.03)
    assert meter.acceptance[3] == pytest.approx(0.125, abs=0.03)


def test_costs_follow_what_is_measured_and_one_outlier_moves_little() -> None:
    meter = CostMeter({1: 0.010, 4: 0.012, 16: 0.030})
    meter.take(4, 3.0)
    assert meter.curve().seconds(4) == pytest.approx(0.0144)
    assert meter.curve().seconds(16) == pytest.approx(0.033)
    for _ in range(100):
        meter.take(4, 0.024)
    assert meter.curve().seconds(4) == pytest.approx(0.024, rel=0.01)
    assert meter.curve().seconds(1) > 0.012


def test_a_step_is_taken_apart() -> None:
    meter = SpeculationMeter()
    for _ in range(50):
        meter.take(num_rows=6, num_sequences=1, num_drafts=5, target_s=0.004, draft_s=0.005, step_s=0.010)
    costs = meter.costs()
    assert costs.target.seconds(8) == pytest.approx(0.004)
    assert costs.first.seconds(1) == costs.further.seconds(1) == pytest.approx(0.001)
    assert costs.overhead_s == pytest.approx(0.001, rel=0.01)


def test_draft_steps_keep_the_proportion_that_was_measured() -> None:
    meter = SpeculationMeter(MeasuredCosts(target={1: 0.004}, first={1: 0.003}, further={1: 0.001}))
    for _ in range(200):
        meter.take(num_rows=1, num_sequences=1, num_drafts=3, target_s=0.004, draft_s=0.010, step_s=0.014)
    assert meter.costs().first.seconds(1) == pytest.approx(0.006, rel=0.01)
    assert meter.costs().draft_s(1, 5) == pytest.approx(0.014, rel=0.01)


def test_a_cost_that_was_measured_as_nothing_can_be_followed() -> None:
    meter = SpeculationMeter(MeasuredCosts(target={1: 0.01, 2: 0.012}, first={1: 0.001, 2: 0.001}, further={1: 0.0, 2: 0.0005}))
    for draft_s in (0.002, 0.0, 0.0, 0.002):
        meter.take(num_rows=1, num_sequences=1, num_drafts=2, target_s=0.01, draft_s=draft_s, step_s=0.012)
    assert 0.0 < meter.costs().further.seconds(1) < 0.001
    for _ in range(10_000):  # many halvings must not end at 0 either
        meter.take(num_rows=1, num_sequences=1, num_drafts=2, target_s=0.0, draft_s=0.0, step_s=0.0)
    assert meter.costs().further.seconds(1) > 0.0
    assert meter.costs().target.seconds(1) > 0.0


class NoisyRunner:
    """Steps whose first of each kind is slow, and whose long ones seem no slower than the short."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def run(self, plan: StepPlan) -> StepResult:
        kind = (len(plan.slices), plan.slices[0].num_next_drafts)
        is_cold = kind not in self.seen
        self.seen.add(kind)
        return StepResult(step_number=0, samples={}, target_s=9.0 if is_cold else 0.01, draft_s=9.0 if is_cold else 0.001)


def test_calibration_warms_each_size_and_finds_no_step_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "REPEATS", 1)
    costs = calibration.measure_costs(NoisyRunner(), num_blocks=8, max_step_tokens=8)
    assert list(costs.target) == [1, 2, 4, 8]
    assert set(costs.target.values()) == {0.01}
    assert set(costs.first.values()) == {0.001}
    assert min(costs.further.values()) > 0.0
