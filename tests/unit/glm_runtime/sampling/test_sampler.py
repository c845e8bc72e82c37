"""The sampler: greedy rule, filters, distribution, and independence of the batch."""

import itertools

import numpy as np
import pytest
import torch

from glm_runtime.sampling.filters import candidates
from glm_runtime.sampling.sampler import sample
from kv_transfer.messages import SamplingParameters


def asking(seed: int = 1, **options: float) -> SamplingParameters:
    return SamplingParameters(max_tokens=10, seed=seed, **options)


def kept(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    return candidates(np.array(logits), top_k=top_k, top_p=top_p, min_p=min_p).tolist()


def test_greedy_takes_the_largest_and_the_smallest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [asking(temperature=0.0), asking(temperature=9e-6)], [0, 0]) == [1, 0]


def test_top_k_keeps_k_tokens_and_breaks_ties_by_id() -> None:
    assert kept([1.0, 5.0, 3.0, 5.0], top_k=2) == [1, 3]
    assert kept([2.0, 2.0, 2.0, 2.0], top_k=2) == [0, 1]
    assert kept([1.0, 2.0], top_k=99) == [0, 1]


def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.9) == [0, 1, 2]
    assert kept(logits, top_p=1e-9) == [0]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.55) == [0], "0.4 of 0.7 is 0.57"


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log()[None].expand(16, 4)
    counts = torch.zeros(4)
    for seed in range(0, 8000, 16):
        for token in sample(logits, [asking(seed=seed + row) for row in range(16)], [0] * 16):
            counts[token] += 1
    expected = probabilities * 8000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3, "chi square, 3 degrees of freedom, p = 0.001"


def test_draws_of_successive_tokens_are_independent() -> None:
    logits = torch.zeros(1, 2)
    draws = [sample(logits, [asking(seed=3)], [index])[0] for index in range(2000)]
    changes = sum(first != second for first, second in itertools.pairwise(draws))
    assert 900 < changes < 1100
    assert 900 < sum(draws) < 1100


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    hot = sum(sample(logits, [asking(seed=seed, temperature=5.0)], [0])[0] for seed in range(300))
    cold = sum(sample(logits, [asking(seed=seed, temperature=0.2)], [0])[0] for seed in range(300))
    assert cold < 10 < 100 < hot


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"top_k": 50}, {"top_k": 30, "top_p": 0.9, "temperature": 0.6}])
def test_a_row_draws_the_same_in_any_batch(options: dict[str, float]) -> None:
    logits = torch.randn(20, 997, generator=torch.Generator().manual_seed(0)) * 3
    given = [asking(seed=1000 + row, **(options if row % 3 else {"temperature": 0.0})) for row in range(20)]
    together = sample(logits, given, list(range(20)))
    alone = [sample(logits[row : row + 1], [given[row]], [row])[0] for row in range(20)]
    assert together == alone


def test_the_same_seed_and_index_draw_the_same_after_a_retry() -> None:
    logits = torch.randn(1, 500)
    assert sample(logits, [asking(seed=7)], [41]) == sample(logits.clone(), [asking(seed=7)], [41])
    assert len({sample(logits, [asking(seed=7)], [index])[0] for index in range(20)}) > 3
