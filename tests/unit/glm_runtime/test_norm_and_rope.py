"""Norms and rotation against formulas written out."""

import math

import pytest
import torch

from glm_runtime.activation import sigmoid, silu
from glm_runtime.norm import layer_norm, rms_norm
from glm_runtime.rope import RopeTable, rotate_interleaved


def test_rms_norm_is_the_formula() -> None:
    x = torch.tensor([[3.0, 4.0]])
    expected = x / math.sqrt(12.5 + 0.5) * torch.tensor([2.0, 1.0])
    assert torch.allclose(rms_norm(x, torch.tensor([2.0, 1.0]), 0.5), expected)


def test_rms_norm_rounds_once_to_the_input_dtype() -> None:
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.rand(33) + 0.5
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.float(), weight, 1e-5).bfloat16())


def test_layer_norm_removes_the_mean_and_adds_the_bias() -> None:
    x = torch.tensor([[1.0, 3.0]])
    assert torch.allclose(layer_norm(x, torch.ones(2), torch.tensor([10.0, 20.0]), 0.0), torch.tensor([[9.0, 21.0]]))


def test_rotation_keeps_pairs_where_they_are() -> None:
    table = RopeTable.build(100, 4, 100.0)
    positions = torch.tensor([7])
    cos, sin = table.at(positions)
    e0, o0, e1, o1 = 1.0, 2.0, 3.0, 4.0
    angles = (7.0, 7.0 / 10)
    rotated = rotate_interleaved(torch.tensor([[e0, o0, e1, o1]]), cos, sin)[0]
    expected = [
        e0 * math.cos(angles[0]) - o0 * math.sin(angles[0]),
        o0 * math.cos(angles[0]) + e0 * math.sin(angles[0]),
        e1 * math.cos(angles[1]) - o1 * math.sin(angles[1]),
        o1 * math.cos(angles[1]) + e1 * math.sin(angles[1]),
    ]
    assert torch.allclose(rotated, torch.tensor(expected), atol=1e-6)


def test_dot_products_depend_on_the_distance_only() -> None:
    table = RopeTable.build(2000, 64, 1e4)
    q, k = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    near = [rotate_interleaved(v, *(part[0] for part in table.at(torch.tensor([p])))) for v, p in ((q, 30), (k, 13))]
    far = [rotate_interleaved(v, *(part[0] for part in table.at(torch.tensor([p])))) for v, p in ((q, 1930), (k, 1913))]
    assert torch.allclose(near[0] @ near[1], far[0] @ far[1], atol=1e-4)


def test_the_table_is_exact_at_far_positions() -> None:
    position, theta = 1_000_003, 8e6
    table = RopeTable.build(position + 1, 64, theta)
    cos, sin = table.at(torch.tensor([position]))
    angle = position * theta ** (-2 / 64)
    assert (cos[0, 1].item(), sin[0, 1].item()) == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-7)


def test_a_position_has_the_same_bits_whoever_asks_first_and_however_long_the_table_is() -> None:
    """Stretches are made when needed, whole; the last one of a table too."""
    positions = torch.tensor([5000, 1023, 0, 1024, 5001, 2047])
    expected = RopeTable.build(8192, 64, 1e4).at(positions)
    short = RopeTable.build(5002, 64, 1e4)
    for order in (slice(0, 1), slice(3, 5), slice(0, 6)):
        for actual, wanted in zip(short.at(positions[order]), expected, strict=True):
            assert torch.equal(actual, wanted[order])
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        short.at(torch.tensor([5002]))


@pytest.mark.parametrize("length", [1, 7, 16, 31, 33, 1000])
def test_sigmoid_and_silu_do_not_see_an_elements_place(length: int) -> None:
    x = torch.randn(1000 + length, generator=torch.Generator().manual_seed(2)) * 6
    for function, library in ((sigmoid, torch.sigmoid), (silu, torch.nn.functional.silu)):
        assert torch.equal(function(x[5 : 5 + length].clone()), function(x)[5 : 5 + length])
        assert torch.allclose(function(x), library(x), atol=1e-6)
