"""A cluster whose drafts hold by the ratio of probabilities: answers are whole, masked and counted, across the hand-off.

What it draws has the target's distribution (tests/unit/glm_runtime/sampling/test_joint_distribution.py); which tokens these are, nobody
promises. Greedy requests have no draws: theirs are one process's. A cluster of its own, hence with `make test-full` only.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.messages import SamplingParameters
from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, start_cluster, token_ids

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CONFIG = """
[runtime]
verification = "ratio"
adapts_drafts = false
max_drafts = 4
"""
"""Always four drafts, however little they pay on this machine."""
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def ratio_cluster() -> Iterator[RunningCluster]:
    running = start_cluster(config=CONFIG)
    try:
        yield running
    finally:
        running.stop()


def test_sampled_answers_are_whole_and_drafts_hold(ratio_cluster: RunningCluster) -> None:
    """Without seeds, several at once, with prompts around a block's edge."""
    prompts = [make_prompt(length, 500 + length) for length in (63, 64, 65, 300)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ratio_cluster.complete(prompt, MAX_TOKENS, temperature=0.8, top_p=0.95), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["finish_reason"] == "length"
        assert len(token_ids(answer)) == MAX_TOKENS
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), MAX_TOKENS)
    ratio_cluster.wait_until_quiescent()
    worker = ratio_cluster.settled_worker("decode-0")
    assert worker["pairs_up"] == ["prefill-0"]
    assert worker["bytes_read"] > 0, "the prompts came from prefill"
    assert len(worker["accepted"]) == len(worker["drafted"]) == 4
    assert 0 < worker["accepted"][0] <= worker["drafted"][0]


def test_nothing_is_drawn_that_a_request_forbids(ratio_cluster: RunningCluster) -> None:
    """The ratio is that of the distributions after all masks, for drafts and for what replaces them."""
    allowed = (7, 11, 300)
    prompt = make_prompt(100, 600)
    streamed = ratio_cluster.stream(prompt, MAX_TOKENS, temperature=1.0, allowed_token_ids=allowed, logit_bias={"300": -100})
    tokens = [token for event in streamed for token in event]
    assert len(tokens) == MAX_TOKENS
    assert set(tokens) == {7, 11}


def test_greedy_requests_are_verified_exactly(ratio_cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(130, 601)
    assert [token_ids(ratio_cluster.complete(prompt, MAX_TOKENS))] == reference.greedy([prompt], MAX_TOKENS)


def test_a_seed_gives_other_tokens_than_exact_verification(ratio_cluster: RunningCluster, reference: Reference) -> None:
    """Which shows that the ratio is what is served."""
    prompt = make_prompt(130, 602)
    asked = {"temperature": 1.0, "top_p": 1.0, "seed": 3}
    exact = reference.draw([prompt], SamplingParameters(max_tokens=MAX_TOKENS, seed=3, temperature=1.0, top_p=1.0))
    assert [token_ids(ratio_cluster.complete(prompt, MAX_TOKENS, **asked))] != exact
