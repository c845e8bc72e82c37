"""POST /v1/chat/completions.

Knows: messages, effort, thinking and the chat objects. Does not know how an answer is driven (`surface.py`).
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway import sse
from router.gateway.answer import TextDelta
from router.gateway.chat_template import END_OF_THINKING, RESERVED_VARIABLES, START_OF_THINKING
from router.gateway.exchange import Exchange
from router.gateway.generation import Generation
from router.gateway.logprobs import chat_logprobs, prompt_logprobs
from router.gateway.reasoning import find_think_end
from router.gateway.sampling import check_context, check_prompt_bytes
from router.gateway.schema import ChatMessage, ChatRequest, ContentPart, ToolCall, parse_request
from router.gateway.surface import AnswerWriter, GatewayParts, GeneratingEndpoint, new_response_id, now_unix_s

EFFORT_LEVELS = {"none": "low", "minimal": "low", "low": "low", "medium": "high", "high": "high"}
"""OpenAI's levels in the template's words; the others, and none at all, are its maximum."""


class ChatEndpoint(GeneratingEndpoint):
    """Chat completions, streamed or whole."""

    async def start(self, exchange: Exchange, body: bytes) -> tuple[ChatRequest, Generation, "ChatWriter"]:
        """See GeneratingEndpoint."""
        parts = self.parts
        request = parse_request(ChatRequest, body)
        parts.model.check_name(request.model)
        self.note_ignored(exchange, request)
        self.check_choices(1, request)
        grammar = await self.check_grammar(exchange, request)
        parts.relay.admit(request.num_choices)
        messages = [plain_message(message, f"messages.{index}") for index, message in enumerate(request.messages)]
        variables = template_variables(request)
        limit = parts.context_tokens
        tokens = await self.tokenise(len(body), lambda: self._encode(messages, variables, limit))
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        max_tokens = check_context(len(tokens), asked, limit, "messages")
        control_id = parts.tokenizer.control_id
        think_end_id = find_think_end(tokens, control_id(START_OF_THINKING), control_id(END_OF_THINKING))
        if grammar is not None and think_end_id is not None:
            grammar = msgspec.structs.replace(grammar, after_token=think_end_id)
        sampling = self.make_sampling(request, max_tokens, len(tokens), "messages", grammar)
        response_id = new_response_id("chatcmpl")
        legs = self.make_legs(request, response_id, tokens, sampling)
        answers = [self.make_answer(request, leg.sampling, think_end_id) for leg in legs]
        generation = Generation(parts.relay, legs, answers, num_choices=request.num_choices)
        return request, generation, ChatWriter(parts, request, response_id, tokens)

    def _encode(self, messages: list[dict[str, Any]], variables: dict[str, Any], limit_tokens: int) -> list[int]:
        rendered = self.parts.chat_encoder.render(messages, variables)
        num_bytes = sum(len(part.encode()) for part in rendered if isinstance(part, str))
        check_prompt_bytes(num_bytes, self.parts.tokenizer.max_token_bytes, limit_tokens, "messages")
        return self.parts.chat_encoder.encode(rendered)


class ChatWriter(AnswerWriter):
    """Chat objects. prompt: the tokens of the rendered messages."""

    def __init__(self, parts: GatewayParts, request: ChatRequest, response_id: str, prompt: Sequence[int]) -> None:
        options = request.stream_options
        self._id = response_id
        self._created_s = now_unix_s()
        self._model = parts.model.name
        self._fields = parts.config.reasoning_fields
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._chunks = sse.ChatChunks(
            response_id,
            self._created_s,
            self._model,
            has_usage=self._has_usage,
            reasoning_fields=self._fields,
            num_choices=request.num_choices,
        )
        self._texts = parts.token_texts
        self._prompt = prompt
        self._has_logprobs = request.num_logprobs >= 0
        self._has_prompt_logprobs = request.num_prompt_logprobs >= 0
        self._parts: list[list[TextDelta]] = [[] for _ in range(request.num_choices)]

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output, num_cached, num_reasoning = self.generation.count_usage()
        return sse.usage_object(num_prompt, num_output, num_cached, num_reasoning)

    def open(self) -> bytes:
        """See AnswerWriter."""
        return b"".join([self._chunks.role(index) for index in range(len(self._parts))])

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """See AnswerWriter. Log-probabilities go with the first text of the delta, or with none."""
        usage = self._usage() if self._has_running_usage else None
        told = self._logprobs([delta]) if self._has_logprobs and delta.tokens else None
        data = b""
        if delta.reasoning:
            data += self._chunks.reasoning(index, delta.reasoning, told, usage)
            told = None
        if delta.content or (told is not None and delta.finish_reason is None):
            data += self._chunks.content(index, delta.content, told, usage)
            told = None
        if delta.finish_reason is not None:
            data += self._chunks.finish(index, delta.finish_reason, told, usage)
        return data

    def _logprobs(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        tokens = [token for delta in deltas for token in delta.tokens]
        return chat_logprobs(self._texts, tokens, [told for delta in deltas for told in delta.logprobs])

    def usage(self) -> bytes:
        """See AnswerWriter."""
        return self._chunks.usage(self._usage()) if self._has_usage else b""

    def collect(self, index: int, delta: TextDelta) -> None:
        """See AnswerWriter."""
        self._parts[index].append(delta)

    def body(self) -> bytes:
        """See AnswerWriter."""
        told = None
        if self._has_prompt_logprobs:
            told = prompt_logprobs(self._texts, self._prompt, self.generation.choices[0].prompt_logprobs)
        choices = [self._choice(index) for index in range(len(self._parts))]
        return sse.chat_body(self._id, self._created_s, self._model, choices, self._usage(), told)

    def _choice(self, index: int) -> dict[str, Any]:
        answer, deltas = self.generation.choices[index].answer, self._parts[index]
        content = "".join([delta.content for delta in deltas]) if answer.has_content else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message.update(dict.fromkeys(self._fields, "".join([delta.reasoning for delta in deltas])))
        told = self._logprobs(deltas) if self._has_logprobs else None
        return {"index": index, "message": message, "logprobs": told, "finish_reason": answer.finish_reason}


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """The template's variables: the mapped effort, and whatever the client passes raw, which wins."""
    variables: dict[str, Any] = {}
    effort = EFFORT_LEVELS.get(request.reasoning_effort or "")
    if effort is not None:
        variables["reasoning_effort"] = effort
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param=f"chat_template_kwargs.{name}")
        variables[name] = value
    return variables


def plain_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """A message as the template wants it. Raises InvalidRequest, UnsupportedParameter."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _plain_content(message, path)}
    if role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(message.tool_calls)]
    return plain


def _plain_content(message: ChatMessage, path: str) -> str | None:
    """Text parts as one string: the template would join them without a seam, and a control spelling could hide in the seam."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"a {message.role} message needs content", param=f"{path}.content")
        return None
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}.content.{index}") for index, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedParameter(f"content parts of type {part.type[:32]!r} are not supported; send text", param=f"{path}.type")
    if part.text is None:
        raise InvalidRequest("a text part needs text", param=f"{path}.text")
    return part.text


def _plain_call(call: ToolCall, path: str) -> dict[str, Any]:
    """A tool call of the history; the template wants its arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None  # type: ignore[assignment]
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments must be a JSON object", param=f"{path}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
