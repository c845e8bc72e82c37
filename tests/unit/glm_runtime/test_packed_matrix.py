"""Packing loses nothing, and takes bf16 exactly where that is so."""

import pytest
import torch

from glm_runtime.packed_matrix import StackPacker, is_exact_bf16, pack, plain, plain_heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (32, 2), (33, 7), (160, 577), (2, 64)])
def test_unpacking_gives_back_what_was_packed(outputs: int, inner: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, inner).to(dtype)
    packed = pack(weight)
    assert packed.shape == weight.shape
    assert torch.equal(packed.plain(), weight)
    stack = torch.randn(3, outputs, inner).to(dtype)
    assert pack(stack).shape == stack.shape
    assert torch.equal(plain(pack(stack)), stack)
    if outputs % 2 == 0:
        assert torch.equal(pack(weight, is_gated=True).plain(), weight)
        assert torch.equal(pack(stack, is_gated=True).plain(), stack)


def test_what_is_beyond_the_matrix_is_zero() -> None:
    packed = pack(torch.ones(33, 7, dtype=torch.bfloat16))
    assert packed.panels.float().sum() == 33 * 7


def test_plain_operands_are_themselves() -> None:
    weight = torch.randn(2, 3, 4)
    assert plain(weight) is weight
    assert plain_heads(weight) is weight


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        (0.0, True),
        (-2.5, True),
        (1.0 + 2**-7, True),
        (1.0 + 2**-8, False),
        (torch.finfo(torch.float32).max, False),  # would become infinite
        (2.0**-133, True),
        (2.0**-134, False),
        (float("inf"), True),
        (float("nan"), True),
    ],
)
def test_exactly_a_bf16(value: float, is_exact: bool) -> None:
    weight = torch.ones(5, 3)
    weight[4, 2] = value
    assert is_exact_bf16(weight) == is_exact
    assert pack(weight).dtype == (torch.bfloat16 if is_exact else torch.float32)


def test_a_stack_is_widened_when_one_of_it_is_not_a_bf16() -> None:
    exact, inexact = torch.ones(4, 3) * 1.5, torch.full((4, 3), 1.1)
    for items, dtype in (([exact] * 3, torch.bfloat16), ([exact, exact, inexact, exact], torch.float32), ([inexact], torch.float32)):
        packer = StackPacker(len(items), 4, 3, is_gated=True)
        for item in items:
            packer.add(item)
        assert packer.stack().dtype == dtype
        assert torch.equal(packer.stack().plain().float(), torch.stack(items))
