"""The best token: ties, NaN, and a vocabulary in parts."""

import itertools

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.vocab_argmax import Best, merge_shards, vocab_argmax
from tests.unit.glm_runtime.ops.pools import NATIVE

IMPLS = ("reference", "cpu", NATIVE)
NAN, INF = float("nan"), float("inf")
ROWS = [
    # id, logits, id of the best, whether all are finite
    ("one", [3.0], 0, True),
    ("tie", [1.0, 2.0, 2.0, 0.0], 1, True),
    ("tie-across-lanes", [0.0] * 5 + [2.0] + [0.0] * 11 + [2.0] + [0.0] * 3 + [2.0], 5, True),
    ("earlier-lane-later-place", [0.0] * 17 + [5.0] + [0.0] * 13 + [5.0], 17, True),
    ("all-equal", [-7.0] * 40, 0, True),
    ("minus-zero-equals-zero", [-1.0, -0.0, 0.0], 1, True),
    ("first-nan", [9.0, NAN, 1.0, NAN], 1, False),
    ("nan-beats-infinity", [INF, 0.0, NAN], 2, False),
    ("infinity", [1.0, INF, INF], 1, False),
    ("minus-infinity-elsewhere", [1.0, -INF, 3.0], 2, False),
    ("only-minus-infinity", [-INF] * 20, 0, False),
    ("last-of-odd-width", [0.0] * 82 + [1.0], 82, True),
    ("nan-in-the-tail", [0.0] * 80 + [NAN, 1.0], 80, False),
]
BY_ROW = {"argvalues": [row[1:] for row in ROWS], "ids": [row[0] for row in ROWS]}


def same(actual: Best, expected: Best) -> None:
    assert torch.equal(actual.ids, expected.ids)
    assert torch.equal(actual.values.nan_to_num(7e7), expected.values.nan_to_num(7e7))
    assert torch.equal(actual.is_finite, expected.is_finite)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("logits", "best", "is_finite"), **BY_ROW)
def test_the_largest_and_of_equal_ones_the_smallest_id(
    logits: list[float], best: int, is_finite: bool, dtype: torch.dtype, impl: str
) -> None:
    found = vocab_argmax(torch.tensor([logits], dtype=dtype), first_id=100, impl=impl)
    assert found.ids.tolist() == [100 + best]
    assert found.values.dtype is torch.float32
    assert found.values.item() == logits[best] or (found.values.isnan().item() and logits[best] != logits[best])
    assert found.is_finite.tolist() == [is_finite]


def many_ties(rows: int, width: int) -> Tensor:
    return torch.randint(-4, 5, (rows, width), generator=torch.Generator().manual_seed(width)).float()


@pytest.mark.parametrize("impl", ["cpu", NATIVE])
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (3, 15), (16, 64), (5, 83), (40, 2560)])
def test_serving_forms_equal_the_reference(rows: int, width: int, impl: str) -> None:
    logits = many_ties(rows, width)
    same(vocab_argmax(logits, impl=impl), vocab_argmax(logits, impl="reference"))
    wide = torch.full((rows, width + 9), NAN)
    wide[:, :width] = logits
    same(vocab_argmax(wide[:, :width], impl=impl), vocab_argmax(logits, impl="reference"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cuts", [[], [1], [40, 41], [16, 32, 82]], ids=str)
def test_shards_together_choose_what_the_whole_does(cuts: list[int], impl: str) -> None:
    logits = torch.cat((many_ties(20, 83), *(torch.tensor([row[1] * 83])[:, :83] for row in ROWS)))
    bounds = [0, *cuts, 83]
    shards = [vocab_argmax(logits[:, start:end], first_id=start, impl=impl) for start, end in itertools.pairwise(bounds)]
    same(merge_shards(shards), vocab_argmax(logits, impl="reference"))


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_nothing_to_choose_from(impl: str) -> None:
    with pytest.raises(ValueError, match="vocab_argmax: logits have no columns"):
        vocab_argmax(torch.zeros(2, 0), impl=impl)
    with pytest.raises(ValueError, match="merge_shards: no shards"):
        merge_shards([])
