"""Chunks that were put together from bytes are the JSON they should be."""

import json
from typing import Any

from router.gateway.sse import ChatChunks, CompletionChunks, chat_body, completion_body, usage_object

NASTY = 'a "quoted" \\ line\nbreak \u2028 🙂 \x00'
USAGE = usage_object(3, 4, 2, 1)


def read(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]
    return json.loads(event[6:])


def test_chat_chunks() -> None:
    chunks = ChatChunks("id", 5, "glm", has_usage=False, reasoning_fields=("reasoning_content", "reasoning"))
    head = {"id": "id", "object": "chat.completion.chunk", "created": 5, "model": "glm"}

    def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    assert read(chunks.role(0)) == chunk({"role": "assistant", "content": ""})
    assert read(chunks.reasoning(0, NASTY, None, None)) == chunk({"reasoning_content": NASTY, "reasoning": NASTY})
    assert read(chunks.content(0, NASTY, None, None)) == chunk({"content": NASTY})
    assert read(chunks.finish(0, "stop", None, None)) == chunk({}, "stop")


def test_a_choice_and_its_logprobs_are_told_apart() -> None:
    chunks = ChatChunks("id", 5, "glm", has_usage=False, reasoning_fields=("reasoning_content",), num_choices=3)
    (choice,) = read(chunks.content(2, "x", {"content": []}, None))["choices"]
    assert choice == {"index": 2, "delta": {"content": "x"}, "logprobs": {"content": []}, "finish_reason": None}
    told = CompletionChunks("id", 5, "glm", has_usage=False).text(1, "x", None, None, None, {"tokens": ["x"]})
    assert read(told)["choices"][0]["logprobs"] == {"tokens": ["x"]}


def test_usage_is_null_until_it_is_said() -> None:
    chunks = ChatChunks("id", 5, "glm", has_usage=True, reasoning_fields=("reasoning_content",))
    assert read(chunks.content(0, "x", None, None))["usage"] is None
    assert read(chunks.content(0, "x", None, USAGE))["usage"] == USAGE
    last = read(chunks.usage(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_completion_chunks() -> None:
    chunks = CompletionChunks("id", 5, "glm", has_usage=False)
    assert read(chunks.text(3, NASTY, None, None)) == {
        "id": "id", "object": "text_completion", "created": 5, "model": "glm",
        "choices": [{"index": 3, "text": NASTY, "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert read(chunks.text(0, "", "length", None))["choices"][0]["finish_reason"] == "length"


def test_whole_bodies() -> None:
    chat = json.loads(chat_body("id", 5, "glm", [{"index": 0, "message": {"role": "assistant", "content": NASTY}}], USAGE))
    assert chat["choices"][0]["message"]["content"] == NASTY
    assert chat["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }  # fmt: skip
    completion = json.loads(completion_body("id", 5, "glm", [{"index": 0}, {"index": 1}], usage_object(1, 2, 0, None)))
    assert [choice["index"] for choice in completion["choices"]] == [0, 1]
    assert "completion_tokens_details" not in completion["usage"]
