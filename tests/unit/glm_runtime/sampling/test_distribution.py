"""Gumbel-max draws follow the processed distribution. Keyed noise: the same draws in every run, so a bound at p = 1e-4 does not flake."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.rows import SampleRow
from glm_runtime.sampling.sampler import sample_rows, target_scores
from kv_transfer.messages import SamplingParameters

NUM_DRAWS = 60_000
LOGITS = torch.tensor([[2.0, 1.5, 1.2, 0.7, 0.1, -0.3, -1.0, -1.5]])
QUANTILES = {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6, 5: 25.8, 6: 27.9, 7: 29.9}
"""Of chi square, by degrees of freedom, at 1 - 1e-4."""


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2},
        {
            "temperature": 1.4, "top_p": 0.9, "top_k": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2,
            "logit_bias": ((7, 3.0),), "bad_words": ((1, 2),),
        },
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)  # fmt: skip
def test_draws_follow_the_processed_distribution(fields: dict[str, Any]) -> None:
    history = TokenHistory((0, 3), (2, 2, 1))
    counts: Counter[int] = Counter()
    for seed in range(NUM_DRAWS // 1000):
        given = SamplingParameters(max_tokens=2000, seed=seed, **fields)
        rows = [SampleRow(parameters=given, token_index=index, history=history) for index in range(1000)]
        counts.update(one.token for one in sample_rows(LOGITS.expand(1000, -1), rows))
    scores = target_scores(
        LOGITS, [SampleRow(parameters=SamplingParameters(max_tokens=1, seed=0, **fields), token_index=0, history=history)]
    )[0]
    expected = np.exp(scores - scores.max())
    expected *= NUM_DRAWS / expected.sum()
    assert set(counts) == set(np.flatnonzero(expected).tolist())
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in counts)
    assert chi_square < QUANTILES[len(counts) - 1]
