"""POST /tokenize and /detokenize, in vLLM's shapes.

Knows: the two requests and their answers. Does not know how text becomes tokens (`tokenizer.py`, `chat_template.py`).
"""

from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.types import Receive, Scope, Send

from kv_transfer.errors import InvalidRequest
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
        tokens = await tokenise(parts, len(body), lambda: self._encode(request))
        texts = parts.token_texts
        strings = [texts.readable(token) for token in tokens] if request.return_token_strs else None
        told = {"count": len(tokens), "max_model_len": parts.context_tokens, "tokens": tokens, "token_strs": strings}
        await exchange.reply(msgspec.json.encode(told))

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
        detokeniser = Detokeniser(parts.tokenizer.token_bytes)
        text = detokeniser.feed(request.tokens) + detokeniser.flush()
        await exchange.reply(msgspec.json.encode({"prompt": text}))


def _check_model(parts: GatewayParts, name: str | None) -> None:
    """As vLLM's: the name may be left out."""
    if name is not None:
        parts.model.check_name(name)
