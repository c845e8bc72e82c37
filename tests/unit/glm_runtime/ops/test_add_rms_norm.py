"""Residual sum and norm: where the sum is rounded, which eps, and all implementations alike."""

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.add_rms_norm import add_rms_norm
from tests.unit.glm_runtime.ops.pools import NATIVE, relative_rms

IMPLS = ("reference", NATIVE)
CASES = [("one-row", 1, 16), ("odd-width", 5, 83), ("below-a-vector", 3, 7), ("wide", 2, 6144), ("many", 40, 160), ("empty", 0, 32)]
DTYPES = {"argvalues": [torch.float32, torch.bfloat16], "ids": ["fp32", "bf16"]}


def made(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    residual = (torch.randn(rows, width, generator=generator) * 3).to(dtype)
    routed = torch.randn(rows, width, generator=generator)  # fp32 in every mode
    shared = torch.randn(rows, width, generator=generator).to(dtype)
    return residual, routed, shared, (torch.rand(width, generator=generator) + 0.5).to(dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_owed", [0, 1, 2])
@pytest.mark.parametrize("dtype", **DTYPES)
@pytest.mark.parametrize(("rows", "width"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_stream_is_rounded_after_each_sum_and_then_normalised(
    rows: int, width: int, dtype: torch.dtype, num_owed: int, impl: str
) -> None:
    residual, routed, shared, weight = made(rows, width, dtype)
    stream, normed = add_rms_norm(residual, (routed, shared)[:num_owed], weight, 1e-5, impl=impl)
    expected = residual
    if num_owed:
        owed = routed.to(dtype) if num_owed == 1 else (routed.to(dtype).float() + shared.float()).to(dtype)
        expected = (residual.float() + owed.float()).to(dtype)
    assert torch.equal(stream, expected), "sums have one right answer"
    wide = expected.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert normed.dtype is dtype
    assert not rows or relative_rms(normed.double(), exact) < (3e-7 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_norm_reads_the_rounded_sum(impl: str) -> None:
    """1 + 2^-9 is 1 in bf16. Reading the unrounded sums would show in every normed bit."""
    residual, owed = torch.ones(1, 512).bfloat16(), torch.full((1, 512), 2.0**-9)
    stream, normed = add_rms_norm(residual, (owed,), torch.full((512,), 256.0), 0.0, impl=impl)
    assert stream.float().eq(1.0).all()
    assert normed.float().eq(256.0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_eps_keeps_small_rows_small(impl: str) -> None:
    """Numbers of the size of sqrt(eps): the norm halves what another eps would leave."""
    rows = torch.full((1, 64), 1e-3)
    _, normed = add_rms_norm(rows, (), torch.ones(64), 1e-5, impl=impl)
    assert normed[0, 0].item() == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", **DTYPES)
@pytest.mark.parametrize("impl", [NATIVE])
def test_compiled_rows_do_not_see_the_others(impl: str, dtype: torch.dtype) -> None:
    residual, _, shared, weight = made(64, 1000, dtype)
    whole = torch.randn(64, 2000)
    strided = whole[:, 500:1500]
    stream, normed = add_rms_norm(residual, (strided, shared), weight, 1e-5, impl=impl)
    for row in (0, 1, 31, 63):
        at = slice(row, row + 1)
        alone = add_rms_norm(residual[at], (strided[at].contiguous(), shared[at]), weight, 1e-5, impl=impl)
        assert torch.equal(stream[at], alone[0])
        assert torch.equal(normed[at], alone[1])


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"add_rms_norm: weight has shape \[7\]"):
        add_rms_norm(torch.zeros(1, 8), (), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"add_rms_norm: owed has shape \[2, 8\]"):
        add_rms_norm(torch.zeros(1, 8), (torch.zeros(2, 8),), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="add_rms_norm: 3 summands"):
        add_rms_norm(torch.zeros(1, 8), (torch.zeros(1, 8),) * 3, torch.ones(8), 1e-5)
