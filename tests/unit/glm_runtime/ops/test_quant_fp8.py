"""Activations in e4m3: the scale rule, rounding, ragged groups, and both implementations bit for bit."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.quant_fp8 import quant_fp8
from tests.unit.glm_runtime.ops.pools import relative_rms

IMPLS = ("reference", "cpu")
RULES = ("fp32", "ue8m0")


def rows_of_every_size(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-12, 6, rows)[:, None]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rule", RULES)
def test_each_row_and_group_has_its_own_scale(rule: str, impl: str) -> None:
    x = torch.zeros(2, 300)
    x[0, 3], x[0, 200], x[0, 299] = 448.0, -896.0, 7.0
    x[1, 130] = 0.5
    codes, scales = quant_fp8(x, rule, impl=impl)
    floor, half = (1e-10 / 448, 0.5 / 448) if rule == "fp32" else (2.0**-42, 2.0**-9)
    assert scales.flatten().tolist() == pytest.approx([1.0, 2.0, 2.0**-6, floor, half, floor], rel=1e-6)
    assert codes.float()[0, [3, 200, 299]].tolist() == [448.0, -448.0, 448.0]
    assert not codes.float()[1, :128].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 128), (5, 129), (20, 576), (7, 100), (0, 256), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_implementations_agree_bit_for_bit(rows: int, columns: int, dtype: torch.dtype, rule: str) -> None:
    x = rows_of_every_size(rows, columns).to(dtype)
    for given in (x, x.t().contiguous().t()):
        codes, scales = quant_fp8(given, rule, impl="cpu")
        expected, expected_scales = quant_fp8(given, rule, impl="reference")
        assert codes.dtype is torch.float8_e4m3fn
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("impl", IMPLS)
def test_powers_of_two_are_the_least_that_do(impl: str) -> None:
    amaxes = torch.tensor([448.0 * 2.0**e for e in range(-30, 30)])
    amaxes = torch.cat((amaxes, amaxes.nextafter(torch.tensor(0.0)), amaxes.nextafter(torch.tensor(math.inf))))
    _, scales = quant_fp8(amaxes[:, None], "ue8m0", impl=impl)
    for amax, scale in zip(amaxes.tolist(), scales[:, 0].tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5, "a power of two"
        assert Fraction(amax) <= 448 * Fraction(scale)
        assert Fraction(amax) > 448 * Fraction(scale) / 2


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(damage: float, rule: str, impl: str) -> None:
    x = torch.ones(2, 256)
    x[0, 3] = damage
    codes, scales = quant_fp8(x, rule, impl=impl)
    numbers = codes.float() * scales.repeat_interleave(128, dim=1)
    assert numbers[0, :128].isnan().all()
    assert numbers[0, 128:].isfinite().all()
    assert numbers[1].isfinite().all()


@pytest.mark.parametrize(("rule", "limit"), [("fp32", 0.027), ("ue8m0", 0.028)])
def test_a_round_trip_loses_what_e4m3_must(rule: str, limit: float) -> None:
    x = torch.randn(100, 512, generator=torch.Generator().manual_seed(1))
    codes, scales = quant_fp8(x, rule)
    assert limit / 1.2 < relative_rms(codes.float() * scales.repeat_interleave(128, dim=1), x) < limit


def test_refuses_an_unknown_rule() -> None:
    with pytest.raises(ValueError, match="quant_fp8: rule is 'e8m0'"):
        quant_fp8(torch.zeros(1, 1), "e8m0")  # type: ignore[arg-type]
