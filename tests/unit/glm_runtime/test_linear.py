"""Row-invariant matrix products and the probe that finds how to get them."""

import pytest
import torch

from glm_runtime.linear import Gemm, check_items_independent, choose_gemm, is_row_invariant


@pytest.mark.parametrize("gemm", [Gemm(), Gemm(16), Gemm(16, is_fixed=True), Gemm(64, is_fixed=True)])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 100])
def test_padding_and_tiling_change_nothing_but_bits(gemm: Gemm, rows: int) -> None:
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    assert gemm.linear(x, weight).shape == (rows, 40)
    assert torch.allclose(gemm.linear(x, weight), x @ weight.t(), atol=1e-5)
    batched = gemm.matmul(x.expand(3, rows, 24), torch.randn(3, 24, 8))
    assert batched.shape == (3, rows, 8)


def test_the_probe_finds_a_way_on_this_machine_and_it_holds() -> None:
    shapes = {(160, 672), (96, 384), (32, 512)}
    gemm = choose_gemm(shapes)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(672, 160, generator=generator)
    rows = torch.randn(100, 160, generator=generator)
    alone = torch.cat([gemm.linear(row[None], weight) for row in rows])
    assert torch.equal(gemm.linear(rows, weight), alone)


def test_the_probe_sees_a_product_that_depends_on_the_batch() -> None:
    class Careless(Gemm):
        """Adds a trace of the number of rows, as a kernel chosen by it would."""

        def matmul(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x @ weight * (1.0 + 1e-6 * (x.shape[-2] > 16))

    assert not is_row_invariant(Careless(16), 32, 48, torch.Generator().manual_seed(0))


def test_items_of_a_batched_product_are_independent_here() -> None:
    check_items_independent(4, 576, 64)
    check_items_independent(4, 64, 512)
