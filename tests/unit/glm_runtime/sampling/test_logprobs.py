"""Log-probabilities: values, ranks, order of equals."""

import math

import numpy as np
import torch

from glm_runtime.sampling.logprobs import token_logprobs


def test_values_are_those_of_torch() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 5
    expected = torch.log_softmax(logits.double(), -1)
    told = token_logprobs(logits.numpy().astype(np.float64), 17, 20)
    top = expected.topk(20)
    assert [token for token, _ in told.top] == top.indices.tolist()
    assert torch.allclose(torch.tensor([value for _, value in told.top], dtype=torch.float64), top.values, rtol=1e-7, atol=0)
    assert abs(told.logprob - float(expected[17])) < 1e-6
    assert told.rank == int((expected > expected[17]).sum()) + 1


def test_equals_are_ranked_by_id() -> None:
    told = token_logprobs(np.array([1.0, 2.0, 2.0, 1.0, 2.0]), 4, 4)
    assert ([token for token, _ in told.top], told.rank) == ([1, 2, 4, 0], 3)
    assert token_logprobs(np.array([1.0, 2.0, 2.0, 1.0, 2.0]), 3, 0).rank == 5


def test_what_cannot_be_drawn_has_probability_zero() -> None:
    told = token_logprobs(np.array([0.0, -math.inf, -math.inf]), 0, 3)
    assert (told.logprob, told.rank, told.top) == (0.0, 1, ((0, 0.0), (1, -math.inf), (2, -math.inf)))


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    assert len(token_logprobs(np.array([0.0, 1.0]), 0, 20).top) == 2
