"""Compiled products over packed weights: against fp64, and bit for bit where bits are promised."""

import pytest
import torch
from torch import Tensor

from glm_runtime.linear import Gemm
from glm_runtime.native.build import are_kernels_expected
from glm_runtime.native_gemm import NativeGemm
from glm_runtime.packed_matrix import PackedMatrix, empty_panels, pack, pack_into, plain_heads

pytestmark = pytest.mark.skipif(not are_kernels_expected("auto"), reason="no compiler or no AVX-512: compiled kernels cannot be had here")

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(FP32, FP32), (FP32, BF16), (BF16, BF16), (BF16, FP32)]
"""Of x and of the values of the weight."""

SHAPES = [
    # rows, outputs, inner
    (1, 1, 1),
    (1, 160, 576),
    (2, 33, 7),
    (3, 65, 15),
    (5, 31, 64),
    (7, 17, 63),
    (12, 32, 160),
    (13, 96, 17),
    (25, 2624, 65),
    (64, 15, 2624),
    (97, 63, 576),
    (200, 7, 3000),
]


@pytest.fixture(scope="module")
def gemm() -> NativeGemm:
    return NativeGemm()


def weight_of(outputs: int, inner: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(outputs, inner, generator=torch.Generator().manual_seed(seed)) / inner**0.5).to(dtype)


def poisoned_rows(rows: int, inner: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """[rows, inner], a view with NaN before, behind and between its rows."""
    x = torch.full((rows + 2, inner + 9), torch.nan, dtype=dtype)
    view = x[1:-1, 3 : 3 + inner]
    view.copy_(torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)))
    return view


def pack_fp32(weight: Tensor) -> PackedMatrix:
    """Stored as fp32, whether or not bf16 would do."""
    panels = empty_panels(1, *weight.shape, torch.float32)
    pack_into(panels[0], weight.float())
    return PackedMatrix(panels, *weight.shape)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inner"), SHAPES)
def test_linear(gemm: NativeGemm, rows: int, outputs: int, inner: int, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = poisoned_rows(rows, inner, x_dtype), weight_of(outputs, inner, weight_dtype)
    expected = x.double() @ weight.double().t()
    packed = pack(weight)
    assert packed.dtype == weight_dtype or inner * outputs < 2
    wide = gemm.linear(x, packed, dtype=torch.float32)
    assert relative_rms(wide, expected) < 2e-6
    assert torch.equal(gemm.linear(x, packed), wide.to(x_dtype)), "rounded otherwise than once at the end"


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_added_is_added_before_the_one_rounding(gemm: NativeGemm, dtype: torch.dtype) -> None:
    x, packed = poisoned_rows(13, 65, dtype), pack(weight_of(45, 65, BF16))
    add = poisoned_rows(13, 45, dtype, seed=2)
    expected = (gemm.linear(x, packed, dtype=torch.float32) + add.float()).to(dtype)
    assert torch.equal(gemm.linear(x, packed, add=add), expected)


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), KINDS)
@pytest.mark.parametrize(("rows", "inner_size", "inner"), [(1, 1, 9), (4, 16, 64), (30, 17, 33), (50, 90, 129)])
def test_gated(gemm: NativeGemm, rows: int, inner_size: int, inner: int, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = poisoned_rows(rows, inner, x_dtype), weight_of(2 * inner_size, inner, weight_dtype)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    actual = gemm.gated(x, pack(weight, is_gated=True))
    assert relative_rms(actual, gate / (1 + torch.exp(-gate)) * up) < (2e-6 if x_dtype == FP32 else 4e-3)


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), KINDS)
@pytest.mark.parametrize(("rows", "heads", "inner", "outputs"), [(1, 3, 24, 64), (5, 4, 17, 33), (40, 16, 128, 20)])
def test_heads(gemm: NativeGemm, rows: int, heads: int, inner: int, outputs: int, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Over the first columns of each head, and over heads that lie outside rows: nothing is copied."""
    weight = torch.stack([weight_of(inner, outputs, weight_dtype, seed) for seed in range(heads)])
    packed = pack(weight.transpose(1, 2))
    assert torch.equal(plain_heads(packed), weight)
    wide = torch.full((rows, heads, inner + 5), torch.nan, dtype=x_dtype)
    x = wide[..., :inner]
    x.copy_(torch.randn(rows, heads, inner))
    expected = torch.einsum("thn,hnc->thc", x.double(), weight.double())
    tolerance = 2e-6 if x_dtype == FP32 else 4e-3
    assert relative_rms(gemm.heads(x, packed), expected) < tolerance
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(gemm.heads(by_head, packed), gemm.heads(x, packed))


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), KINDS[:3])
@pytest.mark.parametrize(("outputs", "inner"), [(1, 65), (160, 577), (2624, 96)])
def test_a_row_has_the_same_bits_in_every_batch(
    gemm: NativeGemm, outputs: int, inner: int, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    packed = pack(weight_of(outputs, inner, weight_dtype))
    x = poisoned_rows(230, inner, x_dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([gemm.linear(row[None], packed) for row in x])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 4, 7, 12, 13, 16, 25, 100, 230):
                assert torch.equal(gemm.linear(x[:count], packed), alone[:count]), (threads, count)
            assert torch.equal(gemm.linear(x.flip(0), packed).flip(0), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inner"), [(33, 64), (160, 577), (7, 1)])
def test_bf16_weights_give_the_bits_of_the_same_weights_in_fp32(gemm: NativeGemm, outputs: int, inner: int) -> None:
    weight = weight_of(outputs, inner, BF16)
    x = poisoned_rows(29, inner, FP32)
    assert torch.equal(gemm.linear(x, pack(weight)), gemm.linear(x, pack_fp32(weight)))


def test_no_rows(gemm: NativeGemm) -> None:
    packed = pack(weight_of(8, 6, BF16))
    assert gemm.linear(torch.empty(0, 6), packed).shape == (0, 8)
    assert gemm.gated(torch.empty(0, 6), pack(weight_of(8, 6, BF16), is_gated=True)).shape == (0, 4)
    assert gemm.heads(torch.empty(0, 2, 6), pack(torch.zeros(2, 8, 6))).shape == (0, 2, 8)


def test_columns_that_are_not_contiguous_are_copied(gemm: NativeGemm) -> None:
    x, packed = torch.randn(6, 10), pack(weight_of(8, 6, FP32))
    assert torch.equal(gemm.linear(x.t(), packed), gemm.linear(x.t().contiguous(), packed))


def test_not_a_number_stays_in_its_row(gemm: NativeGemm) -> None:
    x, packed = torch.ones(3, 5), pack(weight_of(8, 5, BF16))
    x[1, 2] = torch.nan
    assert gemm.linear(x, packed).isnan().any(1).tolist() == [False, True, False]


def test_silu_of_large_numbers_is_finite(gemm: NativeGemm) -> None:
    packed = pack(torch.tensor([[1.0], [1.0]]), is_gated=True)
    actual = gemm.gated(torch.tensor([[-200.0], [200.0], [0.0]]), packed)
    assert actual.flatten().tolist() == pytest.approx([0.0, 40000.0, 0.0], abs=1e-30)


def test_refuses_what_does_not_fit(gemm: NativeGemm) -> None:
    packed = pack(weight_of(8, 6, BF16))
    with pytest.raises(ValueError, match=r"linear: x is \[2, 5\]; expected \[2, 6\]"):
        gemm.linear(torch.zeros(2, 5), packed)
    with pytest.raises(ValueError, match="gated: expected a packed weight"):
        gemm.gated(torch.zeros(2, 6), packed)
    with pytest.raises(ValueError, match="linear: expected a packed weight"):
        gemm.linear(torch.zeros(2, 6), torch.zeros(8, 6))
    with pytest.raises(ValueError, match="linear: add is"):
        gemm.linear(torch.zeros(2, 6), packed, add=torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        gemm.linear(torch.zeros(2, 6, dtype=torch.float64), packed)


def test_both_forms_of_the_interface_agree(gemm: NativeGemm) -> None:
    """So that the model reads the same with torch and compiled."""
    x, weight, stack = torch.randn(9, 24), weight_of(40, 24, FP32), torch.randn(3, 24, 10)
    by_torch, add = Gemm(), torch.randn(9, 40)
    assert torch.allclose(gemm.linear(x, pack(weight), add=add), by_torch.linear(x, weight, add=add), atol=1e-5)
    assert torch.allclose(gemm.gated(x, pack(weight, is_gated=True)), by_torch.gated(x, weight), atol=1e-5)
    heads = torch.randn(9, 3, 24)
    assert torch.allclose(gemm.heads(heads, pack(stack.transpose(1, 2))), by_torch.heads(heads, stack), atol=1e-5)
