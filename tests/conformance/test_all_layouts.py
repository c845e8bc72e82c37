"""Every legal way to cut a replica into at most eight ranks, against one rank: `make test-layouts`, which keeps what it compared.

Each layout answers twice: with drafts, and without them in chunks. `--layouts-report FILE` writes how much of the answers was compared.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import MARGIN, Answers, assert_answers, config_of, generate_on, one_rank_answers
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

MOST_RANKS = 8
PROMPTS = [make_prompt(length, 600 + length) for length in (1, 63, 64, 129, 200)]
GREEDY = SamplingParameters(max_tokens=40, seed=0, temperature=0.0)
CONFIG = config_of(TINY)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "chunks, no drafts": {"max_drafts": 0, "chunk_tokens": 37, "max_batch_sequences": 3},
}


def all_layouts() -> list[ParallelLayout]:
    """Of tensor, prefill context and decode context sizes 1, 2, 4, with experts cut and spread."""
    sizes = (1, 2, 4)
    return [
        ParallelLayout(tp_size=tp, pcp_size=pcp, dcp_size=dcp, is_expert_parallel=spreads)
        for tp, pcp, dcp, spreads in itertools.product(sizes, sizes, sizes, (False, True))
        if 1 < tp * pcp <= MOST_RANKS and tp % dcp == 0 and (pcp == 1 or dcp == 1)
    ]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return one_rank_answers(CONFIG, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    yield rows
    file: Path | None = request.config.getoption("--layouts-report")
    if file is not None:
        file.write_text(json.dumps({"tie_margin": MARGIN, "rows": rows}, indent=1) + "\n")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", all_layouts(), ids=lambda layout: layout.describe())
def test_answers_are_those_of_one_rank(
    rank_pool: RankPool, answers: Answers, report: list[dict[str, Any]], layout: ParallelLayout, way: str
) -> None:
    first, *others = rank_pool.run(layout, generate_on, CONFIG, PROMPTS, GREEDY, WAYS[way], timeout_s=300.0)
    left_out = assert_answers(first, *answers)
    assert all(each == first for each in others), "all ranks have the same answers"
    num_tokens = sum(map(len, answers[0]))
    report.append(
        {"layout": layout.describe(), "way": way, "num_tokens": num_tokens, "behind_ties_share": left_out, "is_equal": first == answers[0]}
    )
