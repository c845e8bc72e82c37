"""Parts of a softmax put together: against one softmax, with parts that are empty or say that they are in other ways."""

import math

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.combine_shards import combine_shards, shard_weights
from glm_runtime.ops.impl import Impl
from tests.unit.glm_runtime.ops.pools import relative_rms

IMPLS: list[Impl] = ["reference", "cpu"]
INF, NAN = float("inf"), float("nan")


def attention(logits: Tensor, values: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """Over the tokens that are `mine` [T, H, S]: sum of values [S, C] and natural log-sum, in fp64."""
    hidden = torch.where(mine, logits, -INF)
    lse = torch.logsumexp(hidden, -1)
    weights = torch.where(lse[..., None].isfinite(), (hidden - lse[..., None]).exp(), 0.0)
    return torch.einsum("qhs,sc->qhc", weights, values), lse


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_equals_one_softmax(num_parts: int, spread: float, impl: Impl) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    logits = torch.randn(5, 3, 97, generator=generator).double() * spread
    values = torch.randn(97, 16, generator=generator).double()
    home = torch.randint(0, num_parts, (5, 1, 97), generator=generator).expand(5, 3, 97)
    home = torch.where(torch.arange(5)[:, None, None] == 2, 0, home)  # a row with all tokens on one rank
    parts = [attention(logits, values, home == part) for part in range(num_parts)]
    combined = combine_shards(torch.stack([o for o, _ in parts]).float(), torch.stack([lse for _, lse in parts]).float(), impl=impl)
    expected, _ = attention(logits, values, torch.ones_like(home, dtype=torch.bool))
    assert combined.shape == (5, 3, 16)
    # A log-sum of 100 in fp32 is exact to 4e-6, and so is a weight.
    assert relative_rms(combined, expected.float()) < 2e-6
    assert torch.equal(combined[2], parts[0][0].float()[2]), "the only part that has tokens counts for all, exactly"


@pytest.mark.parametrize("impl", IMPLS)
def test_what_an_empty_part_may_say(impl: Impl) -> None:
    lse = torch.tensor([[[0.0, NAN, INF, -INF, 1e30]], [[0.0, 2.0, 3.0, -INF, -1e30]]])
    weights = shard_weights(lse, impl=impl)
    assert weights[:, 0].t().tolist() == [[0.5, 0.5], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    attended = torch.ones(2, 1, 5, 4)
    assert combine_shards(attended, lse, impl=impl)[0, :, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_damage_in_an_output_is_not_hidden(impl: Impl) -> None:
    attended = torch.tensor([NAN, 1.0]).view(2, 1, 1, 1)
    assert combine_shards(attended, torch.tensor([NAN, 0.0]).view(2, 1, 1), impl=impl).isnan().all()


def test_log_sums_are_natural() -> None:
    weights = shard_weights(torch.tensor([math.log(3.0), 0.0]).view(2, 1, 1))
    assert weights.flatten().tolist() == pytest.approx([0.75, 0.25], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serving_form_equals_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    attended = torch.randn(4, 9, 5, 33, generator=generator).to(dtype)
    lse = torch.randn(4, 9, 5, generator=generator) * 20
    lse[1, 3] = -INF
    lse[:, 5] = -INF
    attended[:, 5] = 0
    actual, expected = combine_shards(attended, lse, impl="cpu"), combine_shards(attended, lse, impl="reference")
    assert relative_rms(actual, expected) < 3e-7
    assert not actual[5].any()


def test_a_rows_bits_do_not_depend_on_its_step() -> None:
    generator = torch.Generator().manual_seed(2)
    attended, lse = torch.randn(4, 37, 3, 512, generator=generator), torch.randn(4, 37, 3, generator=generator) * 5
    together = combine_shards(attended, lse)
    for row in range(37):
        assert torch.equal(combine_shards(attended[:, row : row + 1], lse[:, row : row + 1])[0], together[row])


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="lse has shape"):
        combine_shards(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5))
