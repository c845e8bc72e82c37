"""Drafts across a hand-off: the same tokens as without, and the same drafts held as in one process, position by position.

Drafts that are wrong cost only time, so equal answers would not show MTP keys that were left behind; equal counts do.
"""

import dataclasses
from collections.abc import Iterator

import pytest

from glm_runtime.engine.draft_meter import DraftMeter
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from kv_transfer.messages import FinishReason, SamplingParameters
from tests.conformance.test_worker_pair import RUNTIME, Pair
from tests.prompts import make_prompt

MAX_TOKENS = 40
GREEDY = SamplingParameters(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)
LENGTHS = (1, 40, 64, 129, 150, 193, 230)
"""Beyond 64 tokens the MTP layer's own indexer chooses what it attends to."""


@pytest.fixture(scope="module", params=[5, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def max_drafts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def runtime(max_drafts: int) -> GlmRuntime:
    return GlmRuntime.load(dataclasses.replace(RUNTIME, cache_bytes=64 << 20, max_drafts=max_drafts, adapts_drafts=False))


@pytest.fixture(scope="module")
def pair(runtime: GlmRuntime) -> Iterator[Pair]:
    pair = Pair(runtime.runtime_config)
    yield pair
    pair.close()


def test_answers_and_held_drafts_equal_one_process(pair: Pair, runtime: GlmRuntime, max_drafts: int) -> None:
    prompts = [make_prompt(length, number) for number, length in enumerate(LENGTHS)]
    meter = DraftMeter()
    answers = generate(runtime, prompts, GREEDY, drafts=meter)
    assert answers == generate(runtime, prompts, GREEDY, max_drafts=0)
    assert [pair.ask(prompt, GREEDY).tokens for prompt in prompts] == answers
    load = pair.load("d0")
    assert load.drafted == tuple(meter.drafted[:max_drafts])
    assert load.accepted == tuple(meter.accepted[:max_drafts])
    assert load.accepted[0] > 0.6 * load.drafted[0]
    assert load.num_steps < sum(map(len, answers)) / 1.3


def test_the_cached_prompt_and_answer_are_a_start_as_good_as_any(pair: Pair, runtime: GlmRuntime) -> None:
    """A prefix hit brings the MTP layer's keys along, from either worker."""
    prompt = make_prompt(200, 20)
    first = pair.ask(prompt, GREEDY).tokens
    turn = prompt + first + make_prompt(30, 21)
    before = pair.load("d0")
    again = pair.ask(turn, GREEDY)
    assert again.tokens == generate(runtime, [turn], GREEDY, max_drafts=0)[0]
    after, meter = pair.load("d0"), DraftMeter()
    generate(runtime, [turn], GREEDY, drafts=meter)
    assert again.num_cached_tokens >= 192
    assert [new - old for new, old in zip(after.accepted, before.accepted, strict=True)] == meter.accepted[: len(after.accepted)]


def test_a_batch_of_unlike_requests(pair: Pair, runtime: GlmRuntime) -> None:
    prompts = [make_prompt(30 + 37 * number, 30 + number) for number in range(6)]
    stop = generate(runtime, prompts[:1], GREEDY, max_drafts=0)[0][5]
    sampling = [
        SamplingParameters(max_tokens=MAX_TOKENS, seed=1, temperature=0.0, stop_token_ids=(stop,)),
        SamplingParameters(max_tokens=1, seed=2, temperature=0.0),
        SamplingParameters(max_tokens=MAX_TOKENS, seed=3, temperature=0.8, top_p=0.9),
        SamplingParameters(max_tokens=2, seed=4, temperature=0.0),
        SamplingParameters(max_tokens=MAX_TOKENS, seed=5, temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.4),
        SamplingParameters(max_tokens=7, seed=6, temperature=1.0, top_k=30),
    ]
    answers = pair.ask_all(prompts, sampling)
    assert [answer.tokens for answer in answers] == generate(runtime, prompts, sampling, max_drafts=0)
    assert answers[0].finish is FinishReason.STOP


DRAWN = SamplingParameters(max_tokens=MAX_TOKENS, seed=7, temperature=0.9, top_p=0.95, frequency_penalty=0.2)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_resumed_in_the_middle(pair: Pair, runtime: GlmRuntime, sampling: SamplingParameters) -> None:
    prompt = make_prompt(100, 40)
    (whole,) = generate(runtime, [prompt], sampling, max_drafts=0)
    assert pair.ask(prompt, sampling, emitted=whole[:13]).tokens == whole[13:]
    assert pair.ask(prompt, sampling, emitted=whole[:27], prefill=None).tokens == whole[27:]
