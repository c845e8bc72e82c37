"""Prefill, hand-off and decode in three processes give the tokens that one process gives: real Ray, real NIXL, HTTP, no margin."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.messages import SamplingParameters
from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, cached_tokens, token_ids, wait_until

pytestmark = pytest.mark.cluster

BLOCK = 64
MAX_TOKENS = 20


def test_prompts_around_block_boundaries(cluster: RunningCluster, reference: Reference) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193]
    prompts = [make_prompt(length, number) for number, length in enumerate(lengths)]
    answers = [token_ids(cluster.complete(prompt, MAX_TOKENS)) for prompt in prompts]
    assert answers == reference.greedy(prompts, MAX_TOKENS)


def test_an_answer_that_crosses_block_boundaries(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(60, 20)
    assert [token_ids(cluster.complete(prompt, 140))] == reference.greedy([prompt], 140)


@pytest.mark.parametrize("length", [511, 512, 513, 1500])
def test_prompts_of_several_chunks(cluster: RunningCluster, reference: Reference, length: int) -> None:
    prompt = make_prompt(length, 30 + length)
    assert [token_ids(cluster.complete(prompt, MAX_TOKENS))] == reference.greedy([prompt], MAX_TOKENS)


def test_the_same_prompt_again_is_a_prefix_hit_with_the_same_answer(cluster: RunningCluster, reference: Reference) -> None:
    for length in (2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 17):
        prompt = make_prompt(length, 40 + length)
        first, again = cluster.complete(prompt, MAX_TOKENS), cluster.complete(prompt, MAX_TOKENS)
        assert cached_tokens(first) < BLOCK
        assert cached_tokens(again) >= (length - 1) // BLOCK * BLOCK
        assert [token_ids(first)] == [token_ids(again)] == reference.greedy([prompt], MAX_TOKENS)


def test_prompts_that_share_a_beginning(cluster: RunningCluster, reference: Reference) -> None:
    beginning = make_prompt(4 * BLOCK, 50)
    prompts = [beginning + make_prompt(extra, 60 + extra) for extra in (1, 30, BLOCK, 100)] + [beginning, beginning[: 3 * BLOCK + 5]]
    answers = [cluster.complete(prompt, MAX_TOKENS) for prompt in prompts]
    assert [token_ids(answer) for answer in answers] == reference.greedy(prompts, MAX_TOKENS)
    assert all(cached_tokens(answer) >= 3 * BLOCK for answer in answers[1:])


def test_the_next_turn_of_a_conversation(cluster: RunningCluster, reference: Reference) -> None:
    """Its beginning was computed by two workers: the prompt by prefill, the answer by decode."""
    prompt = make_prompt(100, 70)
    answer = token_ids(cluster.complete(prompt, 100))
    turn = prompt + answer + make_prompt(40, 71)
    second = cluster.complete(turn, MAX_TOKENS)
    assert [answer] == reference.greedy([prompt], 100)
    assert [token_ids(second)] == reference.greedy([turn], MAX_TOKENS)


def test_sixteen_at_once_of_mixed_lengths(cluster: RunningCluster, reference: Reference) -> None:
    lengths = [4096, 7, 640, 64, 1280, 129, 33, 2048, 256, 65, 900, 511, 12, 320, 1, 1024]
    prompts = [make_prompt(length, 100 + number) for number, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: token_ids(cluster.complete(prompt, MAX_TOKENS)), prompts))
    assert answers == reference.greedy(prompts, MAX_TOKENS)


def test_a_stream_carries_the_same_tokens_in_order(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(200, 80)
    streamed = [token for tokens in cluster.stream(prompt, 40) for token in tokens]
    assert [streamed] == reference.greedy([prompt], 40)


def test_a_seed_draws_the_same_tokens(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(90, 81)
    sampling = SamplingParameters(max_tokens=30, seed=4711, temperature=1.0, top_p=0.9, top_k=50)
    answers = [token_ids(cluster.complete(prompt, 30, temperature=1.0, top_p=0.9, top_k=50, seed=4711)) for _ in range(2)]
    assert [answers[0]] == [answers[1]] == reference.draw([prompt], sampling)


def test_every_request_was_handed_off_over_nixl(cluster: RunningCluster) -> None:
    """The counters say that bytes moved: no answer above came from a local prefill."""
    before = cluster.worker("decode-0")["bytes_read"]
    cluster.complete(make_prompt(300, 90), 2)
    # A worker's row is up to a second old.
    wait_until(lambda: cluster.worker("decode-0")["bytes_read"] > before, 10.0, lambda: f"no bytes moved beyond {before}")
