"""Output with drafts equals output without them, token by token, whatever is drafted, batched or drawn."""

from typing import Any

import pytest

from glm_runtime.engine.draft_meter import DraftMeter
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import CACHE_CHOICES, TINY
from tests.prompts import make_prompt

PROMPTS = [make_prompt(length, number) for number, length in enumerate((5, 64, 90, 130, 63, 1))]
"""Around block edges, and beyond the 64 tokens that the indexer selects."""


def load(**choices: Any) -> GlmRuntime:
    return GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1, **choices))


@pytest.fixture(scope="module")
def runtime() -> GlmRuntime:
    return load()


@pytest.fixture(scope="module")
def greedy(runtime: GlmRuntime) -> list[list[int]]:
    return generate(runtime, PROMPTS, greedy_parameters(40), max_drafts=0)


def greedy_parameters(max_tokens: int, **fields: Any) -> SamplingParameters:
    return SamplingParameters(max_tokens=max_tokens, seed=0, temperature=0.0, **fields)


def test_without_the_layer_at_all(greedy: list[list[int]]) -> None:
    assert generate(load(max_drafts=0), PROMPTS, greedy_parameters(40)) == greedy


@pytest.mark.parametrize("max_drafts", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 37, "max_batch_sequences": 2}], ids=["whole", "chunks"])
def test_any_number_of_drafts(runtime: GlmRuntime, greedy: list[list[int]], max_drafts: int, options: dict[str, Any]) -> None:
    assert generate(runtime, PROMPTS, greedy_parameters(40), max_drafts=max_drafts, **options) == greedy


def test_eight_drafts(greedy: list[list[int]]) -> None:
    assert generate(load(max_drafts=8), PROMPTS, greedy_parameters(40)) == greedy


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_the_last_token_is_the_last(runtime: GlmRuntime, greedy: list[list[int]], max_tokens: int) -> None:
    assert generate(runtime, PROMPTS, greedy_parameters(max_tokens)) == [answer[:max_tokens] for answer in greedy]


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_a_stop_token_inside_the_accepted_run_ends_it(runtime: GlmRuntime, greedy: list[list[int]], place: int) -> None:
    stops = [answer[place] for answer in greedy]
    sampling = [greedy_parameters(40, stop_token_ids=(stop,)) for stop in stops]
    answers = generate(runtime, PROMPTS, sampling)
    assert answers == [answer[: answer.index(stop) + 1] for answer, stop in zip(greedy, stops, strict=True)]


def test_drawn_tokens_do_not_depend_on_drafts(runtime: GlmRuntime) -> None:
    sampling = [SamplingParameters(max_tokens=30, seed=seed, temperature=0.8, top_p=0.9) for seed in range(len(PROMPTS))]
    assert generate(runtime, PROMPTS, sampling) == generate(runtime, PROMPTS, sampling, max_drafts=0)


def test_mixed_batches(runtime: GlmRuntime, greedy: list[list[int]]) -> None:
    drawn = SamplingParameters(max_tokens=40, seed=3, temperature=1.0, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3)
    sampling = [drawn if number % 2 else greedy_parameters(40) for number in range(len(PROMPTS))]
    answers = generate(runtime, PROMPTS, sampling, max_batch_sequences=3)
    assert answers == generate(runtime, PROMPTS, sampling, max_drafts=0, max_batch_sequences=1)
    assert answers[::2] == greedy[::2]


@pytest.mark.parametrize("name", sorted(CACHE_CHOICES))
def test_every_cache_format(name: str) -> None:
    runtime = load(**CACHE_CHOICES[name])
    assert generate(runtime, PROMPTS[:4], greedy_parameters(24)) == generate(runtime, PROMPTS[:4], greedy_parameters(24), max_drafts=0)


def test_without_compiled_kernels() -> None:
    """Products padded to the BLAS's row tile, where a step's rows are not a multiple of it."""
    runtime = load(kernels="torch")
    assert generate(runtime, PROMPTS, greedy_parameters(24)) == generate(runtime, PROMPTS, greedy_parameters(24), max_drafts=0)


@pytest.mark.parametrize("least", [0.2, 0.7, 1.0])
def test_early_stops_change_no_token(greedy: list[list[int]], least: float) -> None:
    runtime = load(min_draft_probability=least)
    counted, all_counted = DraftMeter(), DraftMeter()
    assert generate(runtime, PROMPTS, greedy_parameters(40), drafts=counted) == greedy
    assert generate(load(), PROMPTS, greedy_parameters(40), drafts=all_counted) == greedy
    assert sum(counted.drafted) < sum(all_counted.drafted)
    shares = [sum(meter.accepted) / max(sum(meter.drafted), 1) for meter in (counted, all_counted)]
    assert shares[0] > shares[1] or not sum(counted.drafted), "what is left out is what does not hold"
    sampling = [SamplingParameters(max_tokens=30, seed=seed, temperature=0.8, top_p=0.9) for seed in range(len(PROMPTS))]
    assert generate(runtime, PROMPTS, sampling) == generate(runtime, PROMPTS, sampling, max_drafts=0)


@pytest.fixture(scope="module", params=["ratio", "ratio_greedy"])
def ratio_runtime(request: pytest.FixtureRequest) -> GlmRuntime:
    return load(verification=request.param, min_draft_probability=0.1)


def test_the_ratio_test_leaves_greedy_answers_alone(ratio_runtime: GlmRuntime, greedy: list[list[int]]) -> None:
    assert generate(ratio_runtime, PROMPTS, greedy_parameters(40)) == greedy
    mixed = [SamplingParameters(max_tokens=40, seed=3) if number % 2 else greedy_parameters(40) for number in range(len(PROMPTS))]
    assert generate(ratio_runtime, PROMPTS, mixed, max_batch_sequences=3)[::2] == greedy[::2]


def test_the_ratio_test_is_reproducible_and_keeps_its_limits(ratio_runtime: GlmRuntime) -> None:
    sampling = [
        SamplingParameters(max_tokens=30, seed=seed, temperature=0.8, allowed_token_ids=tuple(range(300))) for seed in range(len(PROMPTS))
    ]
    drafts = DraftMeter()
    answers = generate(ratio_runtime, PROMPTS, sampling, drafts=drafts)
    assert answers == generate(ratio_runtime, PROMPTS, sampling)
    assert {len(answer) for answer in answers} == {30}
    assert max(token for answer in answers for token in answer) < 300
    assert 0 < drafts.accepted[0] < drafts.drafted[0]


def test_more_drawn_drafts_hold_by_their_ratio() -> None:
    sampling = [SamplingParameters(max_tokens=48, seed=seed) for seed in range(len(PROMPTS))]
    shares = {}
    for verification in ("exact", "ratio"):
        drafts = DraftMeter()
        generate(load(verification=verification), PROMPTS, sampling, drafts=drafts)
        shares[verification] = drafts.accepted[0] / drafts.drafted[0]
    assert shares["ratio"] > shares["exact"]
