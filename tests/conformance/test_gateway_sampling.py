"""What clients may ask of the sampler, as they ask for it: several answers, log-probabilities, echoes. With the real `openai` client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kv_transfer.identity import WorkerId, unpack_tokens
from kv_transfer.messages import OpenSink, SamplingParameters, StartSource
from router.gateway.tokenizer import TextTokenizer
from tests.fakes.fake_workers import FakeCluster, scripted_model
from tests.fakes.gateway_process import RunningGateway

HI = [{"role": "user", "content": "hi"}]
WHOLE = "I think so.</think>Hello there, friend. ñandú 🙂 bye"
LONG = [5] * 200
"""A prompt of several blocks."""


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def opened(workers: FakeCluster) -> list[OpenSink]:
    return [message for worker in ("decode-0", "decode-1") for message in workers.received(worker, OpenSink)]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="glm", messages=HI, **fields)  # type: ignore[call-overload]


def test_every_parameter_reaches_the_worker(client: openai.OpenAI, workers: FakeCluster, gateway_tokenizer: TextTokenizer) -> None:
    extra = {
        "min_p": 0.05, "top_k": 7, "min_tokens": 2, "bad_words": ["bye"], "allowed_token_ids": [3, 4, 5], "repetition_penalty": 1.1,
        "stop_token_ids": [9], "ignore_eos": True,
    }  # fmt: skip
    chat(client, max_tokens=3, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"4": 2}, seed=3, extra_body=extra)
    (message,) = opened(workers)
    words = tuple(map(tuple, gateway_tokenizer.encode_runs(["bye", " bye"])))
    assert message.sampling == SamplingParameters(
        max_tokens=3, seed=3, temperature=1.0, top_p=0.95, top_k=7, stop_token_ids=(9,), min_p=0.05, min_tokens=2, repetition_penalty=1.1,
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias=((4, 2.0),), allowed_token_ids=(3, 4, 5), bad_words=words,
    )  # fmt: skip


# -- several answers -----------------------------------------------------------------------------------------------------


def test_several_answers_have_seeds_of_their_own_and_the_prompt_counts_once(client: openai.OpenAI, workers: FakeCluster) -> None:
    workers.num_cached_tokens = 5
    one = chat(client, seed=11)
    answer = chat(client, n=3, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {one.choices[0].message.content}
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    seeds = [message.sampling.seed for message in opened(workers)]
    assert len(set(seeds)) == 3, "the first answer's seed is the request's, so it is drawn twice"
    assert seeds.count(11) == 2


def test_the_other_answers_wait_until_the_prompt_is_cached(client: openai.OpenAI, workers: FakeCluster) -> None:
    workers.prefill_s = 0.3
    answer = client.completions.create(model="glm", prompt=[LONG, [1, 2]], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (202, 16)
    started = [message.transfer.request_id.split("-", 1)[1].partition("-")[2] for message in workers.received("prefill-0", StartSource)]
    assert sorted(started) == ["0", "0-1", "1", "1-1"]
    assert started[3] == "0-1", "a short prompt has nothing to share: only the long one's second answer waits"


def test_several_answers_streamed(client: openai.OpenAI) -> None:
    texts, reasons, usage = ["", ""], ["", ""], None
    stream = client.completions.create(
        model="glm", prompt=LONG, n=2, max_tokens=100, stream=True, stream_options={"include_usage": True}
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert (texts, reasons) == ([WHOLE, WHOLE], ["stop", "stop"])
    assert usage is not None
    assert usage.prompt_tokens == 200
    roles = [choice.index for chunk in chat(client, n=2, stream=True) for choice in chunk.choices if choice.delta.role]
    assert roles == [0, 1]


# -- log-probabilities ---------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_an_entry_for_each_token(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert [entry.logprob for entry in content] == [-(place + 1) / 8 for place in range(len(content))]
    assert bytes(byte for entry in content for byte in entry.bytes).decode().startswith(WHOLE)
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in content)
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * len(bare)
    assert chat(client).choices[0].logprobs is None


def test_streamed_chat_logprobs_add_up_to_the_whole_ones(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=1, stop="friend").choices[0].logprobs.content
    streamed = []
    for chunk in chat(client, logprobs=True, top_logprobs=1, stop="friend", stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs is not None else []
    assert streamed == whole


def test_the_streaming_helper_takes_logprobs(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="glm", messages=HI, logprobs=True) as stream:  # type: ignore[arg-type]
        stream.until_done()
        told = stream.get_final_completion().choices[0].logprobs
    assert told is not None
    assert told.content == chat(client, logprobs=True).choices[0].logprobs.content


@pytest.mark.parametrize("is_streamed", [False, True])
def test_completion_logprobs_and_their_offsets(
    client: openai.OpenAI, workers: FakeCluster, gateway_tokenizer: TextTokenizer, is_streamed: bool
) -> None:
    tokens = gateway_tokenizer.encode_raw("a 🙂 b")
    workers.model = scripted_model(tokens)
    request: dict[str, Any] = {"model": "glm", "prompt": "x", "max_tokens": len(tokens), "logprobs": 1}
    text, told = read(client, is_streamed, request)
    assert text == "a 🙂 b"
    assert told["token_logprobs"] == [-(place + 1) / 8 for place in range(len(tokens))]
    assert all(len(top) >= 1 and token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in told["tokens"]), "parts of a character are told by their bytes"


def read(client: openai.OpenAI, is_streamed: bool, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if not is_streamed:
        choice = client.completions.create(**request).choices[0]
        assert choice.logprobs is not None
        return choice.text, choice.logprobs.to_dict()
    text = ""
    told: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for chunk in client.completions.create(**request, stream=True):
        text += chunk.choices[0].text
        for name, values in (chunk.choices[0].logprobs.to_dict() if chunk.choices[0].logprobs else {}).items():
            told[name] += values
    return text, told


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echoed_prompt_is_scored(client: openai.OpenAI, workers: FakeCluster, max_tokens: int, is_streamed: bool) -> None:
    text, told = read(
        client, is_streamed, {"model": "glm", "prompt": "Hi there", "max_tokens": max_tokens, "echo": True, "logprobs": 0}
    )  # fmt: skip
    assert text == "Hi there" + ("I think" if max_tokens else "")
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert "".join(told["tokens"]) == text
    assert [text[offset:].startswith(token) for token, offset in zip(told["tokens"], told["text_offset"], strict=True)] == [True] * len(
        told["tokens"]
    )
    assert told["token_logprobs"][1] == -2 / 8, "the first token that follows something is at place 1"
    (message,) = opened(workers)
    assert (message.sampling.prompt_logprobs, message.sampling.max_tokens) == (0, max(max_tokens, 1))
    assert len(told["tokens"]) == len(unpack_tokens(message.tokens)) + max_tokens


def test_a_scored_prompt_without_an_answer_counts_no_token(gateway: RunningGateway) -> None:
    body = {"model": "glm", "prompt": ["ab", "cd"], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("ab", "length")] * 2 + [("cd", "length")] * 2
    assert answer["choices"][0]["logprobs"] == answer["choices"][1]["logprobs"], "what is told of a prompt is told with each of its answers"
    assert answer["usage"]["completion_tokens"] == 0


def test_a_prompt_that_fills_the_context_can_be_scored(gateway: RunningGateway) -> None:
    body = {"model": "glm", "prompt": [5] * 8192, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 8192
    for fields in ({"max_tokens": 1}, {"prompt": [5] * 8193}):
        refused = httpx.post(f"{gateway.url}/v1/completions", json={**body, **fields}, timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_prompt_logprobs_as_vllm_tells_them(gateway: RunningGateway) -> None:
    body = {"model": "glm", "prompt": [65, 66, 67], "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert [list(place) for place in choice["prompt_logprobs"][1:]] == [["66"], ["67"]]
    assert choice["prompt_logprobs"][1]["66"] == {
        "logprob": -2 / 8,
        "rank": 1,
        "decoded_token": choice["prompt_logprobs"][1]["66"]["decoded_token"],
    }
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={"model": "glm", "messages": HI, "prompt_logprobs": 0}, timeout=20
    ).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_logprobs_go_on_where_another_attempt_takes_over(client: openai.OpenAI, workers: FakeCluster) -> None:
    workers.workers[WorkerId("decode-0")].faults.crash_at_index = 4
    content = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-(place + 1) / 8 for place in range(len(content))]
