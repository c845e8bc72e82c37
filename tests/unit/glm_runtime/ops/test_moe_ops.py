"""Routed experts: kernels against the reference."""

import pytest
import torch

from glm_runtime.linear import Gemm
from glm_runtime.ops.moe_experts import moe_experts
from tests.unit.glm_runtime.ops.pools import relative_rms

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
    with pytest.raises(ValueError, match="moe_experts: down"):
        moe_experts(torch.zeros(1, 8), torch.zeros(1, 1).long(), torch.ones(1, 1), torch.zeros(4, 6, 8), torch.zeros(4, 8, 4), gemm=Gemm())
