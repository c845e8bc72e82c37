"""The best token's probability: forms against the reference, a row alone and among others."""

import pytest
import torch

from glm_runtime.ops.top_probability import top_probability
from tests.unit.glm_runtime.ops.pools import NATIVE

IMPLS = ("reference", "cpu", NATIVE)


@pytest.mark.parametrize("impl", IMPLS)
def test_known_values(impl: str) -> None:
    logits = torch.tensor([[0.0] * 20, [-1e4] * 19 + [3.0], [5.0, 5.0] + [-1e4] * 18])
    assert top_probability(logits, logits.amax(-1), impl=impl).tolist() == pytest.approx([1 / 20, 1.0, 0.5], rel=1e-6)


@pytest.mark.parametrize("impl", ["cpu", NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (3, 15), (16, 64), (5, 83), (40, 2560), (2, 154_880)])
def test_serving_forms_equal_the_reference(rows: int, width: int, dtype: torch.dtype, impl: str) -> None:
    logits = (torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    wide = torch.full((rows, width + 9), float("nan"), dtype=dtype)
    wide[:, :width] = logits
    largest = logits.float().amax(-1)
    found = top_probability(wide[:, :width], largest, impl=impl)
    torch.testing.assert_close(found, top_probability(logits, largest, impl="reference"), rtol=2e-5, atol=0)
    for row in range(min(rows, 3) if impl == "native" else 0):  # torch sums in an order that depends on the table
        assert torch.equal(top_probability(logits[row : row + 1], largest[row : row + 1], impl=impl), found[row : row + 1])


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_shapes_that_do_not_fit(impl: str) -> None:
    with pytest.raises(ValueError, match=r"top_probability: largest has shape \[3\]; expected \[2\]"):
        top_probability(torch.zeros(2, 5), torch.zeros(3), impl=impl)
