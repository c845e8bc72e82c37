"""The official client works against the cluster, streaming and not."""

from collections.abc import Iterator

import openai
import pytest

from tests.running_cluster import RunningCluster

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


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["glm"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=QUESTION)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
