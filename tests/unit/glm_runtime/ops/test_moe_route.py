"""Routing: rules written out, and the implementations against each other."""

import pytest
import torch

from glm_runtime.ops.moe_route import Routing, moe_route
from tests.unit.glm_runtime.ops.pools import NATIVE

IMPLS = ("reference", NATIVE)


def routing(chosen: int, groups: int = 1, kept: int = 1, scale: float = 2.5, is_normalised: bool = True) -> Routing:
    return Routing(num_chosen=chosen, num_groups=groups, num_chosen_groups=kept, is_normalised=is_normalised, scale=scale)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_bias_chooses_but_does_not_weigh(impl: str) -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 10.0])
    chosen, gates = moe_route(logits, bias, routing(2), impl=impl)
    assert chosen.tolist() == [[0, 3]]
    scores = torch.sigmoid(logits)[0, [0, 3]]
    assert torch.allclose(gates[0], 2.5 * scores / scores.sum())


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_go_to_the_smaller_expert(impl: str) -> None:
    assert moe_route(torch.zeros(1, 6), torch.zeros(6), routing(3), impl=impl)[0].tolist() == [[0, 1, 2]]
    assert moe_route(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), torch.zeros(5), routing(3), impl=impl)[0].tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("impl", IMPLS)
def test_without_normalisation_gates_are_the_scores(impl: str) -> None:
    logits = torch.randn(3, 8)
    chosen, gates = moe_route(logits, torch.zeros(8), routing(2, scale=1.0, is_normalised=False), impl=impl)
    assert torch.allclose(gates, torch.sigmoid(logits).gather(1, chosen))


@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_best_groups_are_considered(impl: str) -> None:
    # Group scores are sums of the two largest: 0.9 + 0.1, 0.6 + 0.5, 0.2 + 0.1; the single best expert is in a group that loses.
    scores = torch.tensor([[0.9, 0.1, 0.05, 0.6, 0.5, 0.05, 0.2, 0.1, 0.05]])
    chosen, _ = moe_route(torch.logit(scores), torch.zeros(9), routing(2, groups=3, kept=1), impl=impl)
    assert chosen.tolist() == [[3, 4]]
    chosen, _ = moe_route(torch.logit(scores), torch.zeros(9), routing(3, groups=3, kept=2), impl=impl)
    assert chosen.tolist() == [[0, 3, 4]]


@pytest.mark.parametrize("impl", IMPLS)
def test_forced_experts_replace_the_choice_of_their_rows_only(impl: str) -> None:
    logits = torch.randn(2, 6)
    free, _ = moe_route(logits, torch.zeros(6), routing(2), impl=impl)
    chosen, gates = moe_route(logits, torch.zeros(6), routing(2), torch.tensor([[5, 0], [-1, -1]]), impl=impl)
    assert chosen.tolist() == [[0, 5], free[1].tolist()]
    assert torch.allclose(gates.sum(-1), torch.tensor([2.5, 2.5]))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_forced_row_is_sorted_and_weighed_by_its_own_scores(impl: str) -> None:
    logits = torch.tensor([[3.0, -2.0, 0.5, 1.0]])
    chosen, gates = moe_route(logits, torch.tensor([0.0, 9.0, 0.0, 0.0]), routing(2), torch.tensor([[3, 1]]), impl=impl)
    scores = torch.sigmoid(logits)[0, [1, 3]]
    assert chosen.tolist() == [[1, 3]]
    assert torch.allclose(gates[0], 2.5 * scores / scores.sum())


CASES = [
    # id, rows, experts, chosen, groups, kept groups
    ("glm-5.3", 40, 256, 8, 1, 1),
    ("one-row", 1, 32, 4, 1, 1),
    ("odd", 7, 37, 3, 1, 1),
    ("all", 5, 8, 8, 1, 1),
    ("one-of-many", 3, 100, 1, 1, 1),
    ("groups", 20, 64, 6, 8, 3),
    ("groups-of-odd-size", 9, 45, 5, 5, 2),
    ("more-than-the-groups-hold", 4, 12, 8, 3, 2),
    ("empty", 0, 16, 2, 1, 1),
]


@pytest.mark.parametrize("impl", [NATIVE])
@pytest.mark.parametrize("is_coarse", [False, True], ids=["distinct", "many-ties"])
@pytest.mark.parametrize(("rows", "experts", "each", "groups", "kept"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_implementations_choose_alike(rows: int, experts: int, each: int, groups: int, kept: int, is_coarse: bool, impl: str) -> None:
    """Sets are equal where no two biased scores are within rounding of each other, and where they are exactly equal."""
    generator = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(rows, experts, generator=generator), torch.randn(experts, generator=generator) * 0.1
    if is_coarse:
        logits, bias = torch.randint(-1, 2, (rows, experts), generator=generator) * 40.0, torch.zeros(experts)  # scores 0, 1/2, 1
    forced = torch.full((rows, each), -1)
    forced[::3] = torch.arange(each).flip(0)
    expected, expected_gates = moe_route(logits, bias, routing(each, groups, kept), forced, impl="reference")
    wide = torch.full((rows, experts + 3), torch.nan)
    wide[:, :experts] = logits
    chosen, gates = moe_route(wide[:, :experts], bias, routing(each, groups, kept), forced, impl=impl)
    assert torch.equal(chosen, expected)
    assert torch.allclose(gates, expected_gates, rtol=1e-6, atol=1e-7)
    for row in range(0, rows, 5):
        alone = moe_route(logits[row : row + 1], bias, routing(each, groups, kept), forced[row : row + 1], impl=impl)
        assert torch.equal(alone[0][0], chosen[row])
        assert torch.equal(alone[1][0], gates[row])


@pytest.mark.parametrize("impl", IMPLS)
def test_damage_is_chosen_so_that_it_shows(impl: str) -> None:
    logits = torch.tensor([[1.0, 2.0, float("nan"), 0.0]])
    chosen, gates = moe_route(logits, torch.zeros(4), routing(2), impl=impl)
    assert chosen.tolist() == [[1, 2]]
    assert gates.isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_what_does_not_fit(impl: str) -> None:
    with pytest.raises(ValueError, match="moe_route: bias"):
        moe_route(torch.zeros(1, 4), torch.zeros(5), routing(2), impl=impl)
    with pytest.raises(ValueError, match=r"moe_route: logits are torch\.bfloat16"):
        moe_route(torch.zeros(1, 4).bfloat16(), torch.zeros(4), routing(2), impl=impl)
    with pytest.raises(ValueError, match="moe_route: 4 experts in 3 groups"):
        moe_route(torch.zeros(1, 4), torch.zeros(4), routing(2, groups=3), impl=impl)
    with pytest.raises(ValueError, match="moe_route: forced has shape"):
        moe_route(torch.zeros(1, 4), torch.zeros(4), routing(2), torch.zeros(1, 3, dtype=torch.int64), impl=impl)


@pytest.mark.parametrize("impl", [NATIVE])
def test_a_forced_expert_must_exist(impl: str) -> None:
    with pytest.raises(ValueError, match="moe_route: forced names expert 4; there are 4"):
        moe_route(torch.zeros(1, 4), torch.zeros(4), routing(2), torch.tensor([[0, 4]]), impl=impl)
