"""Block-FP8 products: whose scale goes where, ragged blocks, rows grouped by expert."""

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.block_fp8_gemm import block_fp8_gemm, grouped_block_fp8_gemm
from glm_runtime.ops.quant_fp8 import quant_fp8
from glm_runtime.quantisation import quantise_block_fp8
from tests.unit.glm_runtime.ops.pools import relative_rms

IMPLS = ("reference", "cpu")
CASES = [
    # id, rows, outputs, inputs
    ("one", 1, 1, 1),
    ("one-block", 3, 128, 128),
    ("kv_a-576-rows", 5, 576, 384),
    ("head-448-rows", 2, 448, 512),
    ("block-edge-less-one", 4, 127, 255),
    ("block-edge-and-one", 4, 129, 257),
    ("many", 70, 320, 640),
    ("no-rows", 0, 130, 200),
]
BY_CASE = {"argvalues": [case[1:] for case in CASES], "ids": [case[0] for case in CASES]}


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales that differ from block to block by orders of magnitude, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(outputs)
    sizes = 10.0 ** torch.randint(-2, 3, (-(-outputs // 128), -(-inputs // 128)), generator=generator)
    spread = sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]
    weight, weight_scales = quantise_block_fp8(torch.randn(outputs, inputs, generator=generator) * spread)
    x, x_scales = quant_fp8(torch.randn(rows, inputs, generator=generator) * 10.0 ** torch.randint(-2, 3, (rows, 1), generator=generator))
    return x, x_scales, weight, weight_scales


def exact(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Number by number from each operand's own block, in fp64."""
    rows, columns = torch.arange(weight.shape[0]), torch.arange(x.shape[1])
    wide = weight.double() * weight_scales.double()[rows[:, None] // 128, columns // 128]
    return (x.double() * x_scales.double()[:, columns // 128]) @ wide.T


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), **BY_CASE)
def test_equals_the_product_of_the_numbers(rows: int, outputs: int, inputs: int, impl: str) -> None:
    given = operands(rows, outputs, inputs)
    product = block_fp8_gemm(*given, torch.float32, impl=impl)
    assert product.shape == (rows, outputs)
    assert not rows or relative_rms(product.double(), exact(*given)) < 3e-7


@pytest.mark.parametrize("impl", IMPLS)
def test_the_result_is_rounded_once(impl: str) -> None:
    given = operands(6, 200, 300)
    wide, narrow = (block_fp8_gemm(*given, dtype, impl=impl) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_rows_take_the_matrix_of_their_run(counts: list[int], impl: str) -> None:
    each = [operands(count, 448, 256 + 64) for count in counts]
    generator = torch.Generator().manual_seed(9)
    weights = [quantise_block_fp8(torch.randn(448, 320, generator=generator)) for _ in counts]
    x, x_scales = torch.cat([given[0].view(torch.uint8) for given in each]).view(torch.float8_e4m3fn), torch.cat([g[1] for g in each])
    stacked = torch.stack([weight.view(torch.uint8) for weight, _ in weights]).view(torch.float8_e4m3fn)
    scales, ends = torch.stack([scale for _, scale in weights]), torch.tensor(counts).cumsum(0)
    product = grouped_block_fp8_gemm(x, x_scales, stacked, scales, ends, torch.float32, impl=impl)
    expected = [exact(given[0], given[1], *weight) for given, weight in zip(each, weights, strict=True)]
    assert product.shape == (sum(counts), 448)
    assert not sum(counts) or relative_rms(product.double(), torch.cat(expected)) < 3e-7


def test_refuses_what_does_not_fit() -> None:
    x, x_scales, weight, weight_scales = operands(2, 200, 300)
    with pytest.raises(ValueError, match=r"block_fp8_gemm: x_scales has shape \[2, 2\]"):
        block_fp8_gemm(x, x_scales[:, :2], weight, weight_scales)
    with pytest.raises(ValueError, match=r"block_fp8_gemm: weight_scales has shape \[1, 3\]"):
        block_fp8_gemm(x, x_scales, weight, weight_scales[:1])
    with pytest.raises(ValueError, match=r"block_fp8_gemm: x is torch\.float32"):
        block_fp8_gemm(x.float(), x_scales, weight, weight_scales)
    with pytest.raises(ValueError, match=r"grouped_block_fp8_gemm: ends are \[1\]"):
        grouped_block_fp8_gemm(x, x_scales, weight[None], weight_scales[None], torch.tensor([1]))
