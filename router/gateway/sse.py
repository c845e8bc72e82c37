"""Server-sent events and the JSON of answers. Chunks are built from prepared bytes: no validation and no dictionaries per token.

Knows: the shapes of OpenAI's objects. Does not know where texts come from.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_json = msgspec.json.Encoder().encode


def event(payload: bytes) -> bytes:
    """One event."""
    return b"data: " + payload + b"\n\n"


def usage_object(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int | None) -> dict[str, Any]:
    """OpenAI's usage. num_reasoning: None where nothing is split off."""
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if num_reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


class _Chunks:
    """What every chunk of one stream has in common."""

    def __init__(self, kind: str, response_id: str, created_s: int, model: str, *, has_usage: bool) -> None:
        head = _json({"id": response_id, "object": kind, "created": created_s, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._no_usage = b',"usage":null' if has_usage else b""

    def _close(self, usage: dict[str, Any] | None) -> bytes:
        return b"]" + (self._no_usage if usage is None else b',"usage":' + _json(usage)) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the usage."""
        return self._head + self._close(usage)


class ChatChunks(_Chunks):
    """Chunks of a chat completion. reasoning_fields: names that thinking is sent under. logprobs: as JSON can write them, or None."""

    def __init__(
        self,
        response_id: str,
        created_s: int,
        model: str,
        *,
        has_usage: bool,
        reasoning_fields: Sequence[str],
        num_choices: int = 1,
    ) -> None:
        super().__init__("chat.completion.chunk", response_id, created_s, model, has_usage=has_usage)
        self._opens = [self._head + b'{"index":%d,"delta":' % index for index in range(num_choices)]
        self._reasoning_fields = [b'"' + name.encode() + b'":' for name in reasoning_fields]

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return self._delta(index, b'{"role":"assistant","content":""}', None, None)

    def reasoning(self, index: int, text: str, logprobs: Any, usage: dict[str, Any] | None) -> bytes:
        """More thinking."""
        encoded = _json(text)
        delta = b"{" + b",".join([field + encoded for field in self._reasoning_fields]) + b"}"
        return self._delta(index, delta, logprobs, usage)

    def content(self, index: int, text: str, logprobs: Any, usage: dict[str, Any] | None) -> bytes:
        """More of the answer."""
        return self._delta(index, b'{"content":' + _json(text) + b"}", logprobs, usage)

    def call(self, index: int, call: dict[str, Any], logprobs: Any, usage: dict[str, Any] | None) -> bytes:
        """More of one tool call."""
        return self._delta(index, b'{"tool_calls":[' + _json(call) + b"]}", logprobs, usage)

    def finish(self, index: int, finish_reason: str, logprobs: Any, usage: dict[str, Any] | None) -> bytes:
        """The last chunk of a choice."""
        return self._delta(index, b"{}", logprobs, usage, _json(finish_reason))

    def _delta(self, index: int, delta: bytes, logprobs: Any, usage: dict[str, Any] | None, reason: bytes = b"null") -> bytes:
        told = b"null" if logprobs is None else _json(logprobs)
        return self._opens[index] + delta + b',"logprobs":' + told + b',"finish_reason":' + reason + b"}" + self._close(usage)


class CompletionChunks(_Chunks):
    """Chunks of a completion with one or many prompts."""

    def __init__(self, response_id: str, created_s: int, model: str, *, has_usage: bool) -> None:
        super().__init__("text_completion", response_id, created_s, model, has_usage=has_usage)

    def text(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        usage: dict[str, Any] | None,
        token_ids: Sequence[int] | None = None,
        logprobs: Any = None,
    ) -> bytes:
        """More of one choice; token_ids and logprobs where the client asked for them."""
        reason = b"null" if finish_reason is None else _json(finish_reason)
        ids = b"" if token_ids is None else b',"token_ids":' + _json(token_ids)
        told = b"null" if logprobs is None else _json(logprobs)
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, _json(text), told, reason, ids)
        return self._head + choice + self._close(usage)


def chat_body(
    response_id: str,
    created_s: int,
    model: str,
    choices: Sequence[dict[str, Any]],
    usage: dict[str, Any],
    prompt_logprobs: Any = None,
) -> bytes:
    """A whole chat completion. prompt_logprobs: None where they were not asked for."""
    body = {"id": response_id, "object": "chat.completion", "created": created_s, "model": model, "choices": choices, "usage": usage}
    if prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs
    return _json(body)


def completion_body(
    response_id: str, created_s: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> bytes:  # fmt: skip
    """A whole completion."""
    return _json(
        {"id": response_id, "object": "text_completion", "created": created_s, "model": model, "choices": choices, "usage": usage}
    )  # fmt: skip
