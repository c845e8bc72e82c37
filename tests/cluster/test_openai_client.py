"""The official client works against the cluster, streaming and not."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kv_transfer.messages import SamplingParameters
from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, token_ids

pytestmark = pytest.mark.cluster

QUESTION = [{"role": "user", "content": "Spell the word river."}]


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_a_chat_answer_says_how_it_was_made(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="glm", messages=QUESTION, max_tokens=60, temperature=0)  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content or "") + (choice.message.reasoning_content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    request = {"model": "glm", "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
    content, reasoning, usage = "", "", None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    message = whole.choices[0].message
    assert (content, reasoning) == (message.content or "", message.reasoning_content or "")
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_and_not(client: openai.OpenAI) -> None:
    request = {"model": "glm", "prompt": "The days of the week are", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**request)  # type: ignore[call-overload]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True) if chunk.choices)  # type: ignore[call-overload]
    assert streamed == whole.choices[0].text


def test_several_answers_share_a_prompt_and_keep_their_seeds(client: openai.OpenAI) -> None:
    prompt = make_prompt(200, 300)
    request = {
        "model": "glm",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }

    def tokens_of(answer: Any) -> list[list[int]]:
        return [choice.token_ids for choice in answer.choices]

    first, both = client.completions.create(**request), client.completions.create(**request, n=3)
    assert tokens_of(both)[:1] == tokens_of(first), "asking for more does not change the first"
    assert len({tuple(tokens) for tokens in tokens_of(both)}) == 3
    assert tokens_of(client.completions.create(**request, n=3)) == tokens_of(both)
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (200, sum(map(len, tokens_of(both))))


def test_several_answers_move_their_prompt_once(cluster: RunningCluster, client: openai.OpenAI) -> None:
    def moved_bytes(number: int, count: int) -> int:
        before = cluster.settled_worker("decode-0")["bytes_read"]
        client.completions.create(model="glm", prompt=make_prompt(640, number), max_tokens=2, n=count)
        return int(cluster.settled_worker("decode-0")["bytes_read"] - before)

    one, three = moved_bytes(9310, 1), moved_bytes(9311, 3)
    assert 0 < one <= three < 1.5 * one, "ten blocks once, and the last one for each further answer"


def test_the_whole_sampler_equals_one_process(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(90, 301)
    asked = {
        "temperature": 0.8, "seed": 9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.4,
        "presence_penalty": 0.2, "logit_bias": {"40": 2.0}, "allowed_token_ids": list(range(1500)),
    }  # fmt: skip
    sampling = SamplingParameters(
        max_tokens=30, seed=9, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.4,
        presence_penalty=0.2, logit_bias=((40, 2.0),), allowed_token_ids=tuple(range(1500)),
    )  # fmt: skip
    assert [token_ids(cluster.complete(prompt, 30, **asked))] == reference.draw([prompt], sampling)


def test_log_probabilities_of_an_answer_and_of_its_prompt(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("v1/")
    prompt = httpx.post(f"{url}tokenize", json={"prompt": "The days of the week are"}, timeout=20).json()["tokens"]
    request = {"model": "glm", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**request, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
    told, drawn = whole.choices[0].logprobs, whole.choices[0].token_ids
    assert [max(top, key=top.get) for top in told.top_logprobs] == told.tokens, "greedy takes the most probable"
    scored = client.completions.create(**{**request, "prompt": [*prompt, *drawn], "max_tokens": 0}, echo=True)  # type: ignore[call-overload]
    read = scored.choices[0].logprobs
    assert scored.choices[0].text.startswith("The days of the week are" + whole.choices[0].text)
    assert len(read.tokens) == len(prompt) + len(drawn)
    assert read.tokens[len(prompt) :] == told.tokens
    assert read.token_logprobs[len(prompt) :] == told.token_logprobs
    assert read.token_logprobs[0] is None
    assert all(value <= 0 for value in read.token_logprobs[1:])


def test_chat_log_probabilities_streamed_and_not(client: openai.OpenAI) -> None:
    request = {"model": "glm", "messages": QUESTION, "max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    chunks = client.chat.completions.create(**request, stream=True)  # type: ignore[call-overload]
    streamed = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == content


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["glm"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=QUESTION)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
