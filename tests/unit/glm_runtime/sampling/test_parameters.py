"""Which values a worker takes, whoever has sent them."""

from typing import Any

import numpy as np
import pytest

from glm_runtime.sampling.filters import candidates
from glm_runtime.sampling.parameters import check_sampling
from kv_transfer.errors import InvalidRequest
from kv_transfer.request_values import SamplingParameters

NAN, INFINITE = float("nan"), float("inf")


def check(**given: Any) -> None:
    check_sampling(SamplingParameters(max_tokens=4, seed=0, **given), vocab_size=100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1), ("temperature", INFINITE), ("temperature", NAN), ("temperature", -0.1),
        ("repetition_penalty", 10.1), ("repetition_penalty", 0.0), ("repetition_penalty", NAN),
        ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("presence_penalty", -1e300), ("presence_penalty", NAN),
        ("logit_bias", ((3, 100.5),)), ("logit_bias", ((3, -1e308),)), ("logit_bias", ((3, NAN),)),
        ("stop_token_ids", (7, 100)), ("stop_token_ids", (-1,)),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(**{name: value})
    assert refused.value.param == name


def test_the_ends_of_the_ranges_are_taken() -> None:
    check(temperature=2.0, repetition_penalty=10.0, frequency_penalty=-2.0, presence_penalty=2.0)
    check(temperature=0.0, logit_bias=((0, -100.0), (99, 100.0)), stop_token_ids=(0, 99))


@pytest.mark.parametrize("filters", [{"top_k": 0, "top_p": 0.9, "min_p": 0.0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1},
                                     {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])  # fmt: skip
def test_where_nothing_may_be_drawn_the_largest_is(filters: Any) -> None:
    assert candidates(np.full(8, -np.inf), **filters).tolist() == [0]


@pytest.mark.parametrize("filters", [{"top_k": 0, "top_p": 0.9, "min_p": 0.0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_scores_beyond_all_numbers_are_the_only_ones_left(filters: Any) -> None:
    """A repetition penalty of 1e-308 makes them."""
    scores = np.array([1.0, np.inf, 2.0, np.inf, -np.inf])
    assert candidates(scores, **filters).tolist() == [1]
