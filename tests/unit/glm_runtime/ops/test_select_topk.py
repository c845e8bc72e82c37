"""Top-k: exact, also among ties, zeros of both signs, infinities and NaN."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.native.library import choose_kernels
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.select_topk import select_topk

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-45, -1e-45, 3.4e38]


IMPLS: tuple[Impl, ...] = ("cpu", "native") if choose_kernels("auto") else ("cpu",)


def both(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    chosen = select_topk(scores, visible, k, impl="reference")
    for impl in IMPLS:
        assert torch.equal(select_topk(scores, visible, k, impl=impl), chosen), impl
    return chosen


@pytest.mark.parametrize(
    ("rows", "context", "k"), [(1, 1, 1), (3, 64, 64), (5, 65, 64), (4, 63, 64), (7, 1000, 64), (0, 10, 3), (2, 512, 511)]
)
def test_equals_reference(rows: int, context: int, k: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, context, generator=generator)
    both(scores, torch.randint(0, context + 1, (rows,), generator=generator), k)


def test_equal_scores_go_to_the_smaller_token() -> None:
    assert both(torch.zeros(1, 9), torch.tensor([8]), 3).tolist() == [[0, 1, 2]]
    assert both(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), torch.tensor([5]), 3).tolist() == [[0, 1, 3]]


def test_zeros_of_both_signs_are_equal() -> None:
    assert both(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.tensor([4]), 2).tolist() == [[0, 1]]


def test_nan_comes_last_even_after_minus_infinity() -> None:
    nan = float("nan")
    scores = torch.tensor([[nan, -nan, float("-inf"), -5.0, nan]])
    assert both(scores, torch.tensor([5]), 2).tolist() == [[2, 3]]
    assert both(scores, torch.tensor([5]), 3).tolist() == [[0, 2, 3]]


def test_what_is_not_visible_is_never_chosen() -> None:
    scores = torch.tensor([[0.0, 9.0, 9.0, 9.0]])
    assert both(scores, torch.tensor([1]), 3).tolist() == [[0, -1, -1]]
    assert both(scores, torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]


@given(st.data())
def test_equals_reference_on_hostile_scores(data: st.DataObject) -> None:
    context = data.draw(st.integers(1, 40))
    values = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=context, max_size=context))
    visible = data.draw(st.integers(0, context))
    both(torch.tensor([values]), torch.tensor([visible]), data.draw(st.integers(1, 42)))


def test_many_ties_around_the_threshold() -> None:
    """Scores of few values, as ReLUs that are all zero make them: the k-th value is shared by tokens inside and outside."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (6, 3000), generator=generator).float()
    both(scores, torch.tensor([3000, 2999, 2049, 513, 512, 511]), 512)


def test_refuses_a_k_of_zero() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        select_topk(torch.zeros(1, 3), torch.tensor([3]), 0)
