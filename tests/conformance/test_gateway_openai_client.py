"""The official `openai` client, streaming and not, synchronous and not."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.fakes.gateway_process import RunningGateway

CONTENT = "Hello there, friend. ñandú 🙂 bye"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="glm", messages=HI)  # type: ignore[call-overload]
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (CONTENT, "I think so.")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_streamed(client: openai.OpenAI) -> None:
    content, usage = "", None
    for chunk in client.chat.completions.create(model="glm", messages=HI, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        usage = chunk.usage or usage
        content += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert content == CONTENT
    assert usage is not None
    assert usage.completion_tokens > 0


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="glm", messages=HI) as stream:  # type: ignore[arg-type]
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == CONTENT


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="glm", prompt=["a", "b"], max_tokens=50)
    assert [choice.text for choice in whole.choices] == [f"I think so.</think>{CONTENT}"] * 2
    pieces = client.completions.create(model="glm", prompt="a", max_tokens=50, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == f"I think so.</think>{CONTENT}"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["glm"]
    assert client.models.retrieve("glm").id == "glm"


def test_errors_have_their_class_and_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model="glm", messages=HI, max_tokens=0)  # type: ignore[call-overload]
    assert (caught.value.param, caught.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=HI)  # type: ignore[call-overload]
    assert missing.value.code == "model_not_found"


def test_many_at_once_asynchronously(gateway: RunningGateway) -> None:
    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="glm", messages=HI, stream=True)  # type: ignore[call-overload]
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(20)))

    assert asyncio.run(scene()) == [CONTENT] * 20
