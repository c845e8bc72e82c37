"""Prefill workers that share rows and decode workers that share caches, through the command line: the tokens of one rank.

Every prompt is handed off between workers that are cut differently: blocks go from the rank that serves them to their homes.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, one_rank_answers
from tests.running_cluster import RunningCluster, token_ids

pytestmark = pytest.mark.cluster


def test_pcp_feeds_dcp_and_the_tokens_are_those_of_one_rank(ranks: RunningCluster) -> None:
    assert (ranks.worker("prefill-0")["parallel"], ranks.worker("decode-0")["parallel"]) == ("pcp2", "tp2 dcp2")
    prompts = [make_prompt(length, 700 + number) for number, length in enumerate((5, 64, 150, 700, 1300))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: token_ids(ranks.complete(prompt, 32)), prompts))
    # The next turns find the blocks of the first ones in place on every rank.
    prompts += [[*prompt, *answer, *make_prompt(70, 710)] for prompt, answer in zip(prompts, answers, strict=True)]
    answers += [token_ids(ranks.complete(prompt, 32)) for prompt in prompts[len(answers) :]]
    greedy = SamplingParameters(max_tokens=32, seed=0, temperature=0.0)
    assert_answers(answers, *one_rank_answers(config_of(TINY), prompts, greedy))
    assert ranks.settled_worker("decode-0")["bytes_read"] > 0
