"""Tensor and expert parallelism on real ranks: the answers of one rank, and as many sums as the model has owed ones."""

from collections.abc import Mapping
from typing import Any

import pytest

from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, generate_on, one_rank_answers
from tests.rank_pool import RankPool

PROMPTS = [make_prompt(length, number) for number, length in enumerate((5, 64, 90, 130, 63, 1))]
"""Around block edges, and beyond the 64 tokens that the indexer selects."""
GREEDY = SamplingParameters(max_tokens=40, seed=0, temperature=0.0)
DRAWN = SamplingParameters(max_tokens=40, seed=11, temperature=0.8)
LAYOUTS = [
    ParallelLayout(tp_size=2),
    ParallelLayout(tp_size=4),
    ParallelLayout(tp_size=2, is_expert_parallel=True),
    ParallelLayout(tp_size=4, is_expert_parallel=True, replicates_embedding=True),
]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "no drafts": {"max_drafts": 0},
    "chunks": {"chunk_tokens": 37, "max_batch_sequences": 3},
}
one_of_each = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
CONFIG = config_of(TINY)

Answers = tuple[list[list[int]], list[list[float]]]


@pytest.fixture(scope="module")
def greedy() -> Answers:
    return one_rank_answers(CONFIG, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def drawn() -> Answers:
    return one_rank_answers(CONFIG, PROMPTS, DRAWN)


@one_of_each
@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_one_rank(rank_pool: RankPool, greedy: Answers, layout: ParallelLayout, way: str) -> None:
    first, *others = rank_pool.run(layout, generate_on, CONFIG, PROMPTS, GREEDY, WAYS[way])
    assert_answers(first, *greedy)
    assert all(answers == first for answers in others), "all ranks know what the first has drawn"
