"""Routed experts: each implementation against the reference."""

import pytest
import torch
from torch import Tensor

from glm_runtime.linear import Gemm
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.moe_experts import moe_experts
from glm_runtime.packed_matrix import pack
from tests.unit.glm_runtime.ops.pools import NATIVE, relative_rms

CASES = [
    # id, rows, experts, chosen, hidden, inner
    ("one-row", 1, 4, 1, 8, 8),
    ("one-row-of-many-experts", 1, 64, 4, 63, 17),
    ("odd", 7, 5, 3, 24, 10),
    ("wide", 5, 3, 2, 577, 65),
    ("all-to-one", 33, 4, 1, 16, 16),
    ("every-expert", 50, 8, 8, 32, 24),
    ("more-than-a-block-of-rows", 210, 3, 2, 160, 64),
    ("empty", 0, 4, 2, 8, 8),
]
shapes = pytest.mark.parametrize(
    ("rows", "experts", "chosen_each", "hidden", "inner"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


def make_case(rows: int, experts: int, chosen_each: int, hidden: int, inner: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.full((rows, hidden + 3), torch.nan)[:, 1:-2]
    x.copy_(torch.randn(rows, hidden, generator=generator))
    scores = torch.rand(rows, experts, generator=generator)
    if chosen_each == 1:
        scores[:, 2] = 2.0
    chosen = scores.topk(chosen_each).indices
    gates = torch.rand(rows, chosen_each, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
    return x, chosen, gates, gate_up, down


@pytest.mark.parametrize("impl", ["cpu", NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shapes
def test_equals_reference(rows: int, experts: int, chosen_each: int, hidden: int, inner: int, dtype: torch.dtype, impl: Impl) -> None:
    x, chosen, gates, gate_up, down = make_case(rows, experts, chosen_each, hidden, inner)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    expected = moe_experts(x.float(), chosen, gates, gate_up.float(), down.float(), gemm=Gemm(), impl="reference")
    if impl == "native":
        actual = moe_experts(x, chosen, gates, pack(gate_up, is_gated=True), pack(down), gemm=Gemm(), impl=impl)
    else:
        actual = moe_experts(x, chosen, gates, gate_up, down, gemm=Gemm(), impl=impl)
    assert actual.shape == (rows, hidden)
    assert actual.dtype == torch.float32
    assert not rows or relative_rms(actual, expected) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("gemm", [Gemm(16), Gemm(16, is_fixed=True)], ids=["tiled", "fixed"])
@shapes
def test_torch_with_row_tiles(rows: int, experts: int, chosen_each: int, hidden: int, inner: int, gemm: Gemm) -> None:
    arguments = make_case(rows, experts, chosen_each, hidden, inner)
    expected = moe_experts(*arguments, gemm=gemm, impl="reference")
    assert not rows or relative_rms(moe_experts(*arguments, gemm=gemm), expected) < 1e-6


@pytest.mark.parametrize("impl", [NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, impl: Impl) -> None:
    x, chosen, gates, gate_up, down = make_case(60, 6, 3, 97, 33)
    x, packed = x.to(dtype), (pack(gate_up.to(dtype), is_gated=True), pack(down.to(dtype)))
    alone = torch.cat([moe_experts(x[r : r + 1], chosen[r : r + 1], gates[r : r + 1], *packed, gemm=Gemm(), impl=impl) for r in range(60)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, last in ((0, 60), (0, 16), (5, 18), (59, 60)):
                rows = slice(first, last)
                assert torch.equal(moe_experts(x[rows], chosen[rows], gates[rows], *packed, gemm=Gemm(), impl=impl), alone[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", ["reference", "cpu", NATIVE])
@shapes
def test_experts_that_are_elsewhere_add_nothing(rows: int, experts: int, chosen_each: int, hidden: int, inner: int, impl: Impl) -> None:
    """Two ranks with a part of the experts each: together they give what one gives, and each what its own experts do."""
    x, chosen, gates, gate_up, down = make_case(rows, experts, chosen_each, hidden, inner)
    expected = moe_experts(x, chosen, gates, gate_up, down, gemm=Gemm(), impl="reference")
    total, first = torch.zeros_like(expected), 0
    for count in (experts // 3 + 1, experts - experts // 3 - 1):
        own = slice(first, first + count)
        slots = torch.where((chosen >= first) & (chosen < first + count), chosen - first, -1)
        operands = (pack(gate_up[own], is_gated=True), pack(down[own])) if impl == "native" else (gate_up[own], down[own])
        part = moe_experts(x, slots, gates, *operands, gemm=Gemm(), impl=impl)
        assert not part[(slots < 0).all(1)].any(), "a row without an expert here has no sum here"
        alone = [
            moe_experts(x[row : row + 1], slots[row : row + 1], gates[row : row + 1], *operands, gemm=Gemm(), impl=impl)
            for row in range(rows)
        ]
        if impl == "native":
            assert torch.equal(part, torch.cat([part[:0], *alone])), "a row does not see the others"
        total += part
        first += count
    assert not rows or relative_rms(total, expected) < 1e-6


@pytest.mark.parametrize("impl", ["reference", "cpu", NATIVE])
def test_products_are_added_in_the_order_of_the_list(impl: Impl) -> None:
    """2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1."""
    gate_up, down = torch.ones(3, 2, 1), torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1)
    x, gates = torch.full((2, 1), 64.0), torch.full((2, 3), 2.0**-12)  # silu(64) = 64, times 64
    chosen = torch.tensor([[0, 1, 2], [0, 2, 1]])
    operands = (pack(gate_up, is_gated=True), pack(down)) if impl == "native" else (gate_up, down)
    assert moe_experts(x, chosen, gates, *operands, gemm=Gemm(), impl=impl).flatten().tolist() == [0.0, 1.0]


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="moe_experts: down"):
        moe_experts(torch.zeros(1, 8), torch.zeros(1, 1).long(), torch.ones(1, 1), torch.zeros(4, 6, 8), torch.zeros(4, 8, 4), gemm=Gemm())
