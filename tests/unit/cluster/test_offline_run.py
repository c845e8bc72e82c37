"""Offline generation with the shipped checkpoint: prompts as the API renders them, answers as `generate` gives them."""

from typing import Any

import msgspec
import pytest

from cluster.offline_prompts import GivenPrompt
from cluster.offline_run import OfflineAnswer, OfflineRun, answer_all, describe_run, render_statistics
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import ConfigError, PromptTooLong
from router.gateway.answer import TextDelta
from tests.glm_checkpoints import TINY

RUNTIME = RuntimeConfig(checkpoint=TINY, num_threads=1, cache_bytes=64 << 20)
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def run() -> OfflineRun:
    return OfflineRun(RUNTIME)


@pytest.fixture(scope="module")
def runtime(run: OfflineRun) -> GlmRuntime:
    return run.load()


def prepare(run: OfflineRun, body: dict[str, Any], *, is_raw: bool = False, system: str | None = None, **defaults: Any) -> OfflineAnswer:
    (answer,) = run.prepare([GivenPrompt("here", body)], {**GREEDY, **defaults}, is_raw=is_raw, system=system)
    return answer


def test_a_prompt_is_a_users_message(run: OfflineRun) -> None:
    text = prepare(run, {"prompt": "Name the days."})
    messages = prepare(run, {"messages": [{"role": "user", "content": "Name the days."}]})
    assert text.prompt_tokens == messages.prompt_tokens
    assert prepare(run, {"prompt": "Name the days."}, system="Be brief.").prompt_tokens != text.prompt_tokens
    assert len(prepare(run, {"prompt": "Name the days."}, is_raw=True).prompt_tokens) < len(text.prompt_tokens)


def test_token_ids_are_taken_as_they_are(run: OfflineRun) -> None:
    assert prepare(run, {"prompt": [5, 6, 7]}).prompt_tokens == [5, 6, 7]


def test_a_lines_own_fields_win(run: OfflineRun) -> None:
    sampling = prepare(run, {"prompt": "x", "max_tokens": 3, "seed": 9}, seed=1, top_k=4).sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.temperature) == (3, 9, 4, 0.0)


def test_without_a_limit_an_answer_is_short_and_fits(run: OfflineRun) -> None:
    assert prepare(run, {"prompt": "x"}, max_tokens=None).sampling.max_tokens == 256
    assert prepare(run, {"prompt": [1] * 8100}, max_tokens=None).sampling.max_tokens == 92


@pytest.mark.parametrize(
    ("body", "options", "says"),
    [
        ({"prompt": "x", "temperature": 9}, {}, "temperature"),
        ({"prompt": "x", "n": 2}, {}, "n with this value is not supported"),
        ({"prompt": "x", "logprobs": True}, {}, "logprobs with this value is not supported"),
        ({"prompt": "x", "guided_regex": "(a"}, {}, "guided_regex cannot be used"),
        ({"prompt": "x", "guided_regex": "a", "ignore_eos": True}, {}, "leave out ignore_eos"),
        ({"prompt": ["a", "b"]}, {"is_raw": True}, "a line of its own"),
        ({"prompt": [1, 99999]}, {}, "token id outside 0..2559"),
        ({"prompt": [1] * 9000}, {}, "context is 8192"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"is_raw": True}, "leave --raw out"),
        ({"prompt": "x"}, {"is_raw": True, "system": "y"}, "leave --system out"),
        ({"messages": []}, {}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, {}, "only the server can offer"),
        ({"prompt": "x"}, {"is_raw": True, "max_tokens": 0}, "at least 1"),
    ],
)
def test_a_mistake_is_told_with_its_place(run: OfflineRun, body: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(run, body, **options)
    assert caught.value.path == "here"
    assert says in caught.value.message


def test_an_answer_looks_as_it_is_asked_to(run: OfflineRun, runtime: GlmRuntime) -> None:
    asked = {"structured_outputs": {"choice": ["red", "green"]}, "seed": 5, "reasoning_effort": "low"}
    chat = prepare(run, {"prompt": "Spell the word cat.", **asked}, max_tokens=400)
    raw = prepare(run, {"prompt": "The colour is ", **{name: asked[name] for name in ("structured_outputs", "seed")}}, is_raw=True)
    answer_all(runtime, [chat, raw], load_s=0.0, batch_size=2)
    assert raw.content in ("red", "green")
    assert chat.text.finish_reason == "length" or chat.content in ("red", "green")


def test_answers_are_those_of_generate(run: OfflineRun, runtime: GlmRuntime) -> None:
    answers = [prepare(run, {"prompt": text}) for text in ("Name the days.", "Spell the word cat.", "The")]
    shown: dict[int, str] = {}
    counts: list[tuple[int, int]] = []

    def show(number: int, delta: TextDelta) -> None:
        shown[number] = shown.get(number, "") + delta.content

    statistics = answer_all(
        runtime, answers, load_s=1.0, batch_size=2, on_delta=show, on_count=lambda done, most: counts.append((done, most))
    )
    expected = generate(runtime, [answer.prompt_tokens for answer in answers], [answer.sampling for answer in answers])
    assert [answer.tokens for answer in answers] == expected
    assert [shown[number] for number in range(3)] == [answer.content for answer in answers]
    assert all(answer.text.finish_reason for answer in answers)
    assert counts[-1] == (statistics.num_output_tokens,) * 2 == (sum(map(len, expected)),) * 2
    description = describe_run(answers, statistics)
    assert [answer["token_ids"] for answer in description["answers"]] == expected
    assert "output tokens in" in render_statistics(statistics)
    assert "first token" not in render_statistics(statistics), "only one prompt alone decodes undisturbed"


def test_a_stop_string_ends_generation(run: OfflineRun, runtime: GlmRuntime) -> None:
    free = prepare(run, {"prompt": "The"}, is_raw=True)
    answer_all(runtime, [free], load_s=0.0, batch_size=1)
    word = free.content.split()[2]
    stopped = prepare(run, {"prompt": "The", "stop": word}, is_raw=True)
    statistics = answer_all(runtime, [stopped], load_s=0.0, batch_size=1)
    assert stopped.content == free.content[: free.content.index(word)]
    assert stopped.text.finish_reason == "stop"
    assert statistics.num_output_tokens < len(free.tokens)
    assert statistics.decode_tokens_per_s is not None


def test_words_and_lengths_are_kept_to_as_the_gateway_keeps_them(run: OfflineRun, runtime: GlmRuntime) -> None:
    free = prepare(run, {"prompt": "The"}, is_raw=True)
    answer_all(runtime, [free], load_s=0.0, batch_size=1)
    word = free.content.split()[0]
    without = prepare(run, {"prompt": "The", "bad_words": [word]}, is_raw=True)
    longer = prepare(run, {"prompt": "The", "stop": word, "min_tokens": 12}, is_raw=True)
    answer_all(runtime, [without, longer], load_s=0.0, batch_size=2)
    assert without.sampling.bad_words
    assert without.content.split()[0] != word
    assert len(longer.tokens) == 12, "no stop string before min_tokens"


def test_a_role_ends_a_chat_where_the_gateway_ends_it(run: OfflineRun) -> None:
    (role,) = run._tokenizer.encode_raw("<|observation|>")
    for asked, reason in (({}, "stop"), ({"ignore_eos": True}, None)):
        answer = prepare(run, {"prompt": "x", **asked})
        answer.sampling = msgspec.structs.replace(answer.sampling, stop_token_ids=())
        assert answer.take(role).finish_reason == reason


def test_what_the_cache_cannot_hold_is_refused(run: OfflineRun, runtime: GlmRuntime) -> None:
    with pytest.raises(PromptTooLong, match="the cache holds"):
        answer_all(runtime, [prepare(run, {"prompt": [1] * 7500})], load_s=0.0, batch_size=1)
