"""POST /tokenize and /detokenize, in vLLM's shapes.

Knows: the two requests and their answers. Does not know how text becomes tokens (`tokenizer.py`, `chat_template.py`).
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.types import Receive, Scope, Send

from kv_transfer.errors import InvalidRequest, PromptTooLong
from router.gateway.chat_messages import plain_messages, template_variables
from router.gateway.detokeniser import Detokeniser
from router.gateway.exchange import ClientGone, Exchange
from router.gateway.grammar_fields import OpenModel
from router.gateway.schema import ChatMessage, Effort, TokenIdField, parse_model
from router.gateway.surface import GatewayParts, tokenise
from router.gateway.tools import read_tools


class TokenizeRequest(OpenModel):
    """A raw prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(OpenModel):
    model: str | None = None
    tokens: list[TokenIdField]


class TokenizeEndpoint:
    """Text or messages to token ids, exactly as a completion or a chat would count them."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors are raised; the application's handler answers them."""
        exchange = Exchange(scope, receive, send)
        parts = self._parts
        try:
            request = parse_model(TokenizeRequest, body := await exchange.read_json_body(parts.config.max_body_bytes))
        except ClientGone:
            return
        _check_model(parts, request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either a prompt or messages", param="prompt")
        await exchange.reply(await tokenise(parts, len(body), lambda: self._tell(request)))

    def _tell(self, request: TokenizeRequest) -> bytes:
        parts = self._parts
        tokens = self._encode(request)
        strings = None
        if request.return_token_strs:
            _check_length(parts, len(tokens), "prompt" if request.messages is None else "messages")
            texts = parts.token_texts
            strings = [texts.readable(token) for token in tokens]
        told = {"count": len(tokens), "max_model_len": parts.context_tokens, "tokens": tokens, "token_strs": strings}
        return msgspec.json.encode(told)

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.messages is None:
            return self._parts.tokenizer.encode_raw(request.prompt or "")
        variables = template_variables(request.reasoning_effort, request.chat_template_kwargs)
        tools = read_tools(request.tools, None, None).definitions
        return self._parts.encode_chat(plain_messages(request.messages), variables, tools, is_generating=request.add_generation_prompt)


class DetokenizeEndpoint:
    """Token ids to text, control tokens spelt out."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors are raised; the application's handler answers them."""
        exchange = Exchange(scope, receive, send)
        parts = self._parts
        try:
            request = parse_model(DetokenizeRequest, await exchange.read_json_body(parts.config.max_body_bytes))
        except ClientGone:
            return
        _check_model(parts, request.model)
        if any(token >= parts.model.num_token_ids for token in request.tokens):
            raise InvalidRequest(f"a token id is outside 0..{parts.model.num_token_ids - 1}", param="tokens")
        _check_length(parts, len(request.tokens), "tokens")
        await exchange.reply(await tokenise(parts, len(request.tokens), lambda: self._tell(request.tokens)))

    def _tell(self, tokens: Sequence[int]) -> bytes:
        detokeniser = Detokeniser(self._parts.tokenizer.token_bytes)
        return msgspec.json.encode({"prompt": detokeniser.feed(tokens) + detokeniser.flush()})


def _check_length(parts: GatewayParts, num_tokens: int, param: str) -> None:
    """Raise PromptTooLong for more tokens than any request could have: spelling them out takes time and memory."""
    if num_tokens > parts.context_tokens:
        raise PromptTooLong(f"{num_tokens} tokens, and the model's context is {parts.context_tokens}; shorten it", param=param)


def _check_model(parts: GatewayParts, name: str | None) -> None:
    """As vLLM's: the name may be left out."""
    if name is not None:
        parts.model.check_name(name)
