"""Routing and experts: rules written out, kernels against references."""

import pytest
import torch

from glm_runtime.linear import Gemm
from glm_runtime.ops.moe_experts import moe_experts
from glm_runtime.ops.moe_route import Routing, moe_route
from tests.unit.glm_runtime.ops.pools import relative_rms


def routing(chosen: int, groups: int = 1, kept: int = 1, scale: float = 2.5, is_normalised: bool = True) -> Routing:
    return Routing(num_chosen=chosen, num_groups=groups, num_chosen_groups=kept, is_normalised=is_normalised, scale=scale)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 10.0])
    chosen, gates = moe_route(logits, bias, routing(2))
    assert chosen.tolist() == [[0, 3]]
    scores = torch.sigmoid(logits)[0, [0, 3]]
    assert torch.allclose(gates[0], 2.5 * scores / scores.sum())


def test_ties_go_to_the_smaller_expert() -> None:
    assert moe_route(torch.zeros(1, 6), torch.zeros(6), routing(3))[0].tolist() == [[0, 1, 2]]
    assert moe_route(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), torch.zeros(5), routing(3))[0].tolist() == [[0, 1, 3]]


def test_without_normalisation_gates_are_the_scores() -> None:
    logits = torch.randn(3, 8)
    chosen, gates = moe_route(logits, torch.zeros(8), routing(2, scale=1.0, is_normalised=False))
    assert torch.allclose(gates, torch.sigmoid(logits).gather(1, chosen))


def test_only_the_best_groups_are_considered() -> None:
    # Group scores are sums of the two largest: 0.9 + 0.1, 0.6 + 0.5, 0.2 + 0.1; the single best expert is in a group that loses.
    scores = torch.tensor([[0.9, 0.1, 0.05, 0.6, 0.5, 0.05, 0.2, 0.1, 0.05]])
    chosen, _ = moe_route(torch.logit(scores), torch.zeros(9), routing(2, groups=3, kept=1))
    assert chosen.tolist() == [[3, 4]]
    chosen, _ = moe_route(torch.logit(scores), torch.zeros(9), routing(3, groups=3, kept=2))
    assert chosen.tolist() == [[0, 3, 4]]


def test_forced_experts_replace_the_choice_of_their_rows_only() -> None:
    logits = torch.randn(2, 6)
    free, _ = moe_route(logits, torch.zeros(6), routing(2))
    chosen, gates = moe_route(logits, torch.zeros(6), routing(2), torch.tensor([[5, 0], [-1, -1]]))
    assert chosen.tolist() == [[0, 5], free[1].tolist()]
    assert torch.allclose(gates.sum(-1), torch.tensor([2.5, 2.5]))


CASES = [
    # id, rows, experts, chosen, hidden, inner
    ("one-row", 1, 4, 1, 8, 8),
    ("odd", 7, 5, 3, 24, 10),
    ("all-to-one", 33, 4, 1, 16, 16),
    ("every-expert", 50, 8, 8, 32, 24),
    ("empty", 0, 4, 2, 8, 8),
]


@pytest.mark.parametrize("gemm", [Gemm(), Gemm(16), Gemm(16, is_fixed=True)], ids=["plain", "tiled", "fixed"])
@pytest.mark.parametrize(
    ("rows", "experts", "chosen_each", "hidden", "inner"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_experts_equal_reference(rows: int, experts: int, chosen_each: int, hidden: int, inner: int, gemm: Gemm) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator)
    scores = torch.rand(rows, experts, generator=generator)
    if chosen_each == 1:
        scores[:, 2] = 2.0
    chosen = scores.topk(chosen_each).indices.sort().values
    gates = torch.rand(rows, chosen_each, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
    expected = moe_experts(x, chosen, gates, gate_up, down, gemm=gemm, impl="reference")
    actual = moe_experts(x, chosen, gates, gate_up, down, gemm=gemm)
    assert actual.shape == (rows, hidden)
    assert not rows or relative_rms(actual, expected) < 1e-6


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="moe_route: bias"):
        moe_route(torch.zeros(1, 4), torch.zeros(5), routing(2))
    with pytest.raises(ValueError, match="moe_experts: down"):
        moe_experts(torch.zeros(1, 8), torch.zeros(1, 1).long(), torch.ones(1, 1), torch.zeros(4, 6, 8), torch.zeros(4, 8, 4), gemm=Gemm())
