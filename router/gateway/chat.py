"""POST /v1/chat/completions.

Knows: in which order a chat is checked, and the chat objects. Does not know messages (`chat_messages.py`), tools (`tools.py`), or how an
answer is driven (`surface.py`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from kv_transfer.messages import GrammarSpec, SamplingParameters
from router.gateway import sse
from router.gateway.answer import TextDelta
from router.gateway.chat_messages import plain_messages, template_variables
from router.gateway.chat_template import END_OF_THINKING, START_OF_THINKING
from router.gateway.exchange import Exchange
from router.gateway.generation import Generation
from router.gateway.grammar_fields import find_grammar
from router.gateway.logprobs import chat_logprobs, prompt_logprobs
from router.gateway.reasoning import find_think_end
from router.gateway.sampling import check_context, ends_at_roles
from router.gateway.schema import ChatRequest, parse_request
from router.gateway.surface import AnswerWriter, GatewayParts, GeneratingEndpoint, new_response_id, now_unix_s
from router.gateway.tool_grammar import find_tool_grammar, name_tool
from router.gateway.tools import ToolChoice, ToolUse, read_tools
from router.gateway.turn_parser import CALL_TAGS, CallDelta, Tag

NEVER = -100.0
"""Bias of a token that is not to be drawn; OpenAI's word for it."""


class ChatEndpoint(GeneratingEndpoint):
    """Chat completions, streamed or whole."""

    async def start(self, exchange: Exchange, body: bytes) -> tuple[ChatRequest, Generation, "ChatWriter"]:
        """See GeneratingEndpoint."""
        parts = self.parts
        request = parse_request(ChatRequest, body)
        parts.model.check_name(request.model)
        self.note_ignored(exchange, request)
        self.check_choices(1, request)
        use = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        self._check_vocabulary(use)
        answer_grammar = find_grammar(request)
        asked_grammar = find_tool_grammar(use, answer_grammar)
        try:
            grammar = await self.check_grammar(exchange, request, asked_grammar)
        except InvalidRequest as error:
            raise name_tool(error, use, asked_grammar) from None
        parts.relay.admit(request.num_choices)
        messages = plain_messages(request.messages)
        variables = template_variables(request.reasoning_effort, request.chat_template_kwargs)
        tokens = await self.tokenise(len(body), lambda: parts.encode_chat(messages, variables, use.definitions))
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        max_tokens = check_context(len(tokens), asked, parts.context_tokens, "messages")
        control_id = parts.tokenizer.control_id
        bad_words = await self.tokenise_bad_words(request)
        think_end_id = find_think_end(tokens, control_id(START_OF_THINKING), control_id(END_OF_THINKING))
        if grammar is not None:
            grammar = self._place(grammar, use, think_end_id, is_optional=use.choice is ToolChoice.AUTO and answer_grammar is None)
        sampling = self._forbid_calls(self.make_sampling(request, max_tokens, len(tokens), grammar, bad_words), use)
        response_id = new_response_id("chatcmpl")
        legs = self.make_legs(request, response_id, tokens, sampling)
        calls = use.call_format()
        answers = [self.make_answer(request, leg.sampling, think_end_id, calls=calls, has_roles=ends_at_roles(request)) for leg in legs]
        generation = Generation(parts.relay, legs, answers, num_choices=request.num_choices)
        return request, generation, ChatWriter(parts, request, response_id, tokens)

    def _check_vocabulary(self, use: ToolUse) -> None:
        if use.tools and any(self.parts.tokenizer.control_id(tag.value) is None for tag in CALL_TAGS):
            raise UnsupportedParameter("the model's vocabulary has no tags for tool calls", param="tools")

    def _place(self, grammar: GrammarSpec, use: ToolUse, think_end_id: int | None, *, is_optional: bool) -> GrammarSpec:
        """Where the grammar begins: after thinking, or with a call, which ends thinking too. is_optional: the model may choose text."""
        trigger_id = -1 if use.choice is ToolChoice.NONE else self.parts.tokenizer.control_ids[Tag.CALL_START.value]
        if is_optional:
            return msgspec.structs.replace(grammar, trigger_token=trigger_id, is_optional=True)
        if think_end_id is None:
            return grammar
        return msgspec.structs.replace(grammar, after_token=think_end_id, trigger_token=trigger_id)

    def _forbid_calls(self, sampling: SamplingParameters, use: ToolUse) -> SamplingParameters:
        """With `tool_choice: none` the prompt keeps its tools, and with them its cached prefix; the model is kept from calling."""
        if not use.tools or use.choice is not ToolChoice.NONE:
            return sampling
        bias = {**dict(sampling.logit_bias), self.parts.tokenizer.control_ids[Tag.CALL_START.value]: NEVER}
        return msgspec.structs.replace(sampling, logit_bias=tuple(sorted(bias.items())))


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
        if delta.content or (told is not None and delta.finish_reason is None and not delta.calls):
            data += self._chunks.content(index, delta.content, told, usage)
            told = None
        for call in delta.calls:
            data += self._chunks.call(index, call_object(call), told, usage)
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
        calls = [call for delta in deltas for call in delta.calls]
        if calls:
            message["tool_calls"] = whole_calls(calls)
        told = self._logprobs(deltas) if self._has_logprobs else None
        return {"index": index, "message": message, "logprobs": told, "finish_reason": answer.finish_reason}


def call_object(call: CallDelta) -> dict[str, Any]:
    """An entry of `delta.tool_calls`: the first of a call has its id and name, the others more arguments."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """`message.tool_calls`, of all pieces of one choice."""
    calls = [{"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": ""}} for call in deltas if call.name]
    texts: list[list[str]] = [[] for _ in calls]
    for delta in deltas:
        texts[delta.index].append(delta.arguments)
    for call, pieces in zip(calls, texts, strict=True):
        call["function"]["arguments"] = "".join(pieces)  # type: ignore[index]
    return calls
