"""When drafting stops early: the decision as tables, its prices, and a run of draft steps under it."""

import pytest
import torch

from glm_runtime.engine.draft_budget import CostCurve, StepCosts, expected_tokens
from glm_runtime.engine.draft_meter import DraftMeter
from glm_runtime.engine.draft_run import DraftRun
from glm_runtime.engine.draft_stop import StopRule, is_kept, make_stop_rule, pays_another_step
from glm_runtime.sampling.ratio_test import DraftSource


@pytest.mark.parametrize(
    ("row", "chances", "expected"),
    [
        (0.2, (0.9, 0.2, 0.19), [True, True, False]),
        (0.0, (0.0, 1e-9), [True, True]),
        (1.5, (1.0,), [False]),
        (0.2, (), []),
    ],
)
def test_an_unlikely_draft_is_not_kept(row: float, chances: tuple[float, ...], expected: list[bool]) -> None:
    assert is_kept(StopRule(row=row), chances) == expected


@pytest.mark.parametrize(
    ("rule", "chances", "expected"),
    [
        (StopRule(row=0.2, step=0.5), (), False),
        (StopRule(row=0.2, step=0.5), (0.9,), True),
        (StopRule(row=0.2, step=0.5), (0.6,), False),
        (StopRule(row=0.2, step=0.5), (0.6, 0.4), True),
        (StopRule(row=0.2, step=0.5), (0.4, 0.4), False),
        (StopRule(row=0.0), (1e-9,), True),
        (StopRule(row=0.0), (), False),
    ],
    ids=["nobody", "likely", "the-row-costs-too", "two-share-the-step", "two-that-bring-little", "free", "free-but-nobody"],
)
def test_another_step_must_pay(rule: StopRule, chances: tuple[float, ...], expected: bool) -> None:
    assert pays_another_step(rule, chances) is expected


COSTS = StepCosts(
    target=CostCurve(((1, 0.010), (11, 0.020))),
    first=CostCurve(((1, 0.002),)),
    further=CostCurve(((1, 0.001), (64, 0.001))),
    overhead_s=0.001,
)


def test_prices_are_seconds_at_the_present_speed() -> None:
    # target 0.010 + 5 x 0.001, draft steps 0.002 + 4 x 0.001, overhead 0.001: 22 ms for 1 + 5 x 0.8 tokens.
    rule = make_stop_rule((0.8,) * 8, (1.0,) * 8, COSTS, num_sequences=1, num_drafts=5)
    assert rule is not None
    speed = 5.0 / 0.022
    assert rule.row == pytest.approx(0.001 * speed)
    assert rule.step == pytest.approx(0.001 * speed)
    slower = make_stop_rule((0.1,) * 8, (1.0,) * 8, COSTS, num_sequences=1, num_drafts=5)
    assert slower is not None
    assert slower.row < rule.row


@pytest.mark.parametrize(
    ("num_drafts", "costs"), [(0, COSTS), (5, StepCosts(target=CostCurve(()), first=CostCurve(()), further=CostCurve(())))]
)
def test_no_rule_without_drafts_or_measurements(num_drafts: int, costs: StepCosts) -> None:
    assert make_stop_rule((0.8,) * 8, (1.0,) * 8, costs, num_sequences=2, num_drafts=num_drafts) is None


def test_fewer_made_is_fewer_rows_and_tokens() -> None:
    made = (1.0, 0.5, 0.25)
    assert expected_tokens((0.9, 0.8, 0.8), 3, made) == pytest.approx(1 + 0.9 + 0.4 + 0.2)
    assert COSTS.step_s(1, 3, made) == pytest.approx(0.001 + 0.010 + 0.00175 + 0.002 + 0.0015)
    assert COSTS.step_s(1, 3, (1.0, 1.0, 1.0)) == pytest.approx(COSTS.step_s(1, 3))


def test_the_meter_counts_what_was_made() -> None:
    meter = DraftMeter()
    assert meter.made == (1.0,) * 8
    for _ in range(1000):
        meter.count_made((5, 2, 1, 0), 5)
    assert meter.made[:5] == pytest.approx((0.75, 0.5, 0.25, 0.25, 0.25), abs=0.02)


def test_what_was_made_is_judged_alike_in_whatever_order_it_is_told() -> None:
    shares = []
    for lengths in ([5] * 200 + [0] * 200, [0] * 200 + [5] * 200):
        meter = DraftMeter()
        meter.count_made(lengths, 5)
        shares.append(meter.made[:5])
    assert shares[0] == pytest.approx(shares[1])
    assert shares[0][0] == pytest.approx(0.5, abs=0.02)


SURE, UNSURE = [0.0, 9.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0]


def run_to_the_end(wanted: list[int], rule: StopRule | None, steps: list[list[list[float]]]) -> tuple[DraftRun, int]:
    run = DraftRun(wanted, rule, (), "cpu")
    for number, logits in enumerate(steps, start=1):
        if run.take(torch.tensor(logits)) is None:
            return run, number
    raise AssertionError("the run wants more steps than there are")


def test_all_wanted_drafts_without_a_rule() -> None:
    run, num_steps = run_to_the_end([1, 3], None, [[UNSURE, UNSURE]] * 4)
    assert (run.drafts(), num_steps) == ([(1,), (1, 1, 1)], 3)


def test_each_stops_for_itself_and_all_when_nobody_goes_on() -> None:
    run, num_steps = run_to_the_end([5, 5], StopRule(row=0.5), [[SURE, UNSURE], [SURE, SURE], [UNSURE, SURE], [SURE, SURE]])
    assert (run.drafts(), num_steps) == ([(1, 1), ()], 3)


def test_all_stop_when_a_step_does_not_pay() -> None:
    run, num_steps = run_to_the_end([5, 5], StopRule(row=0.0, step=0.5), [[SURE, UNSURE], [UNSURE, UNSURE], [SURE, SURE]])
    assert (run.drafts(), num_steps) == ([(1, 1), (1, 1)], 2)


def test_drawn_drafts_come_with_what_they_were_drawn_from() -> None:
    sources = [DraftSource(seed=number, token_index=4, temperature=0.5) if number % 2 else None for number in range(200)]
    run = DraftRun([2] * 200, None, sources, "cpu")
    logits = torch.tensor([[0.5, 0.0, 0.4, -9.0]]).repeat(200, 1)
    assert run.take(logits) is not None
    assert run.take(logits) is None
    drafts = run.drafts()
    assert set(drafts[::2]) == {(0, 0)}
    assert len(set(drafts[1::2])) > 3
    for proposed, source in zip(run.proposals, sources, strict=True):
        assert len(proposed) == (0 if source is None else 2)
        for each in proposed:
            torch.testing.assert_close(torch.from_numpy(each), torch.softmax(logits[0] / 0.5, 0))


def test_a_row_that_draws_does_not_stop_by_what_it_drew() -> None:
    """Neither kept nor left out for its probability: that would change the distribution of what is put out."""
    sources = [DraftSource(seed=seed, token_index=0, temperature=1.0) for seed in range(200)]
    run = DraftRun([2] * 200, StopRule(row=0.5), sources, "cpu")
    logits = torch.tensor([UNSURE]).repeat(200, 1)
    assert run.take(logits) is not None
    assert run.take(logits) is None
    assert set(run.num_kept) == {2}
