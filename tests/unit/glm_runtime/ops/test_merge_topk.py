"""The merge of top-k lists: exact, also among ties across ranks; and that it gives what one rank would have chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm_runtime.native.library import choose_kernels
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.merge_topk import merge_topk
from glm_runtime.ops.select_topk import select_topk
from glm_runtime.parallel.decode_context import BlockShare

NAN = float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), NAN, -NAN, 1e-45, -1e-45, 3.4e38]


IMPLS: tuple[Impl, ...] = ("cpu", "native") if choose_kernels("auto") else ("cpu",)


def both(scores: Tensor, tokens: Tensor, k: int) -> list[list[int]]:
    chosen = merge_topk(scores, tokens, k, impl="reference")
    for impl in IMPLS:
        assert torch.equal(merge_topk(scores, tokens, k, impl=impl), chosen), impl
    return chosen.tolist()


def test_equal_scores_go_to_the_smaller_token_whoever_has_it() -> None:
    scores = torch.tensor([[[1.0, 2.0]], [[2.0, 1.0]], [[2.0, 1.0]]])
    tokens = torch.tensor([[[5, 9]], [[2, 3]], [[7, 8]]])
    assert both(scores, tokens, 2) == [[2, 7]]
    assert both(scores, tokens, 4) == [[2, 3, 7, 9]]


def test_zeros_of_both_signs_are_equal() -> None:
    assert both(torch.tensor([[[0.0]], [[-0.0]], [[0.0]]]), torch.tensor([[[4]], [[1]], [[3]]]), 2) == [[1, 3]]


def test_nan_comes_after_minus_infinity_and_before_nothing() -> None:
    scores = torch.tensor([[[NAN, 9.0]], [[float("-inf"), NAN]]])
    tokens = torch.tensor([[[1, -1]], [[6, 2]]])
    assert both(scores, tokens, 1) == [[6]]
    assert both(scores, tokens, 2) == [[1, 6]]
    assert both(scores, tokens, 4) == [[1, 2, 6, -1]], "an entry without a token is none, whatever its score"


def test_lists_may_be_wider_than_what_there_is() -> None:
    assert both(torch.zeros(2, 1, 1), torch.tensor([[[8]], [[-1]]]), 3) == [[8, -1, -1]]
    assert both(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4, dtype=torch.int64), 3) == []


def parts(scores: Tensor, visible: Tensor, k: int, size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Each rank's own top-k of its own tokens, as [W, T, k] scores and tokens of the sequence."""
    chosen_scores, chosen_tokens = [], []
    for rank in range(size):
        share = BlockShare(rank, size, block_size)
        own = share.global_tokens(torch.arange(int(share.local_lengths(visible.max().numpy()))))
        local = select_topk(scores[:, own], torch.from_numpy(share.local_lengths(visible.numpy())), k, impl="reference")
        padded = torch.nn.functional.pad(scores[:, own], (0, 1), value=NAN)
        chosen_scores.append(padded.gather(1, torch.where(local < 0, len(own), local)))
        chosen_tokens.append(share.global_tokens(local))
    return torch.stack(chosen_scores), torch.stack(chosen_tokens)


@given(st.data())
def test_equals_the_selection_of_one_rank_on_hostile_scores(data: st.DataObject) -> None:
    context = data.draw(st.integers(1, 40))
    values = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=context, max_size=context))
    visible = torch.tensor([data.draw(st.integers(1, context))])
    k, size, block_size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 4]))
    scores = torch.tensor([values])
    expected = select_topk(scores, visible, k, impl="reference").tolist()
    assert both(*parts(scores, visible, k, size, block_size), k) == expected


@pytest.mark.parametrize("size", [2, 4, 8])
def test_many_ties_around_the_threshold(size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (6, 3000), generator=generator).float()
    visible = torch.tensor([3000, 2999, 2049, 513, 512, 511])
    expected = select_topk(scores, visible, 512, impl="reference").tolist()
    assert both(*parts(scores, visible, 512, size, 64), 512) == expected


def test_refuses_what_does_not_fit() -> None:
    scores, tokens = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="k is 0"):
        merge_topk(scores, tokens, 0)
    with pytest.raises(ValueError, match="tokens has shape"):
        merge_topk(scores, tokens[:1], 4)
    with pytest.raises(ValueError, match=r"tokens torch\.int32"):
        merge_topk(scores, tokens.int(), 4)
