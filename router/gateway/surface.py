"""What the two generating endpoints share: the parts they are made of, and how an answer is driven to its end.

Knows: the order of validation, submission, streaming and clean-up. Does not know the shape of either API (`chat.py`, `completions.py`).
"""

import asyncio
import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from kv_transfer.errors import InvalidRequest, ServingError, UnsupportedParameter
from kv_transfer.grammar import GrammarSpec
from kv_transfer.identity import RequestId, pack_tokens
from kv_transfer.messages import LogprobsMode, SamplingParameters
from router.config import GatewayConfig
from router.gateway import sse
from router.gateway.answer import Answer, CallFormat, TextDelta, make_answer
from router.gateway.chat_template import ChatEncoder
from router.gateway.errors import error_body
from router.gateway.exchange import ClientGone, Exchange
from router.gateway.generation import Generation
from router.gateway.grammar_checker import GrammarChecker
from router.gateway.grammar_fields import AskedGrammar
from router.gateway.logprobs import TokenTexts
from router.gateway.metrics import GatewayMetrics
from router.gateway.sampling import (
    ServedModel,
    check_can_end,
    check_prompt_bytes,
    check_prompt_logprobs,
    choice_seed,
    make_sampling,
    tokenise_bad_words,
)
from router.gateway.schema import GenerationFields, find_ignored_fields
from router.gateway.tokenizer import TextTokenizer
from router.generation_request import GenerationRequest
from router.relay import Relay

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAMED_FIELDS = 16
MAX_WARNING_LENGTH = 512
UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9_.\-]")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayParts:
    """What an endpoint needs. Made once, when the gateway starts."""

    config: GatewayConfig
    model: ServedModel
    tokenizer: TextTokenizer
    chat_encoder: ChatEncoder
    grammar_checker: GrammarChecker
    relay: Relay
    metrics: GatewayMetrics

    @property
    def token_texts(self) -> TokenTexts:
        """Tokens as clients read them."""
        return TokenTexts(self.tokenizer.token_bytes, self.tokenizer.special_ids)

    @property
    def context_tokens(self) -> int:
        """Longest prompt + output: the checkpoint's, or less when the workers say less."""
        announced = self.relay.registry.max_model_len_tokens()
        return min(self.model.max_model_len_tokens, announced) if announced else self.model.max_model_len_tokens

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]],
        *,
        is_generating: bool = True,
    ) -> list[int]:
        """Prompt tokens of a chat. Raises PromptTooLong before time is spent on a text that cannot fit, InvalidRequest."""
        rendered = self.chat_encoder.render(messages, variables, tools, is_generating=is_generating)
        num_bytes = sum(len(part.encode()) for part in rendered if isinstance(part, str))
        check_prompt_bytes(num_bytes, self.tokenizer.max_token_bytes, self.context_tokens, "messages")
        return self.chat_encoder.encode(rendered)


class AnswerWriter(ABC):
    """Turns the text of one HTTP request into bytes of its API. `generation` is set before any other method is called."""

    generation: Generation

    @abstractmethod
    def open(self) -> bytes:
        """Events that come before any text."""

    @abstractmethod
    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Events for new text of one choice; may be empty."""

    @abstractmethod
    def usage(self) -> bytes:
        """The last event before the end mark; may be empty."""

    @abstractmethod
    def collect(self, index: int, delta: TextDelta) -> None:
        """Keep new text for `body`."""

    @abstractmethod
    def body(self) -> bytes:
        """The whole answer at once."""


class GeneratingEndpoint(ABC):
    """A plain ASGI endpoint: no framework between the parsed body and the bytes of a token."""

    def __init__(self, parts: GatewayParts) -> None:
        self.parts = parts

    @abstractmethod
    async def start(self, exchange: Exchange, body: bytes) -> tuple[GenerationFields, Generation, AnswerWriter]:
        """Validate, tokenise and submit. Raises ServingError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors before the first byte are raised; the application's handler answers them."""
        exchange = Exchange(scope, receive, send)
        try:
            body = await exchange.read_json_body(self.parts.config.max_body_bytes)
            request, generation, writer = await self.start(exchange, body)
        except ClientGone:
            return
        writer.generation = generation
        watching = exchange.watch(lambda: generation.abort("client_gone"))
        try:
            if request.stream:
                await self._stream(exchange, generation, writer)
            else:
                await self._answer(exchange, generation, writer)
        except Exception as error:
            # The boundary of a request task. Before the first byte the application's handler answers; after it only an event can.
            if not exchange.is_started:
                raise
            await self._end_in_error(exchange, error)
        finally:
            watching.cancel()
            generation.close()

    async def _answer(self, exchange: Exchange, generation: Generation, writer: AnswerWriter) -> None:
        while generation.is_open:
            await generation.wait()
            for index, delta in generation.take():
                writer.collect(index, delta)
        if not generation.is_aborted:
            await exchange.reply(writer.body())

    async def _stream(self, exchange: Exchange, generation: Generation, writer: AnswerWriter) -> None:
        """The status line waits for the first text, so that an early failure keeps its status; but never longer than a keep-alive."""
        keepalive_s = self.parts.config.keepalive_s
        while generation.is_open:
            has_news = await generation.wait(keepalive_s)
            chunks = [writer.chunk(index, delta) for index, delta in generation.take()]
            if generation.is_aborted:
                return
            if not chunks and has_news:
                continue
            data = b"".join(chunks)
            if not data and not has_news:  # text may come in the turn in which the silence ended: it goes first
                data = sse.KEEP_ALIVE
            if not exchange.is_started:
                await exchange.open_stream(sse.STREAM_HEADERS)
                data = writer.open() + data
            if data:
                await exchange.write(data)
        if not exchange.is_started:
            await exchange.open_stream(sse.STREAM_HEADERS)
            await exchange.write(writer.open())
        await exchange.write(writer.usage() + sse.DONE, is_last=True)

    async def _end_in_error(self, exchange: Exchange, error: Exception) -> None:
        if not isinstance(error, ServingError):
            logger.exception("request failed by a bug of ours client_request_id=%s", exchange.request_id)
        self.parts.metrics.count_stream_error(error.code if isinstance(error, ServingError) else "internal_error")
        await exchange.write(sse.event(error_body(error)), is_last=True)

    # -- steps that both take ------------------------------------------------------------------------------------------

    def note_ignored(self, exchange: Exchange, request: GenerationFields) -> None:
        """Name what nobody reads, in a header and in a counter. Raises UnsupportedParameter when the configuration is strict."""
        ignored = find_ignored_fields(request)
        if not ignored:
            return
        if self.parts.config.strict_fields:
            raise UnsupportedParameter(f"unknown field {ignored[0]!r}; this server accepts known fields only", param=ignored[0])
        self.parts.metrics.count_ignored_fields(len(ignored))
        names = [UNSAFE_IN_HEADER.sub("?", name)[:64] for name in ignored[:MAX_NAMED_FIELDS]]
        exchange.extra_headers.append((b"x-ignored-fields", ", ".join(names).encode()))

    async def tokenise(self, num_characters: int, encode: Callable[[], T]) -> T:
        """See the function of that name."""
        return await tokenise(self.parts, num_characters, encode)

    async def tokenise_bad_words(self, request: GenerationFields) -> list[list[int]]:
        """See the function of that name. Once for a request, whatever its prompts."""
        words = request.bad_words or ()
        return await self.tokenise(sum(map(len, words)), lambda: tokenise_bad_words(words, self.parts.tokenizer))

    def make_answer(
        self,
        request: GenerationFields,
        sampling: SamplingParameters,
        think_end_id: int | None,
        *,
        calls: CallFormat | None = None,
        has_roles: bool = False,
    ) -> Answer:
        """The text side of one choice."""
        return make_answer(
            self.parts.tokenizer, sampling, stops=request.stop_strings, think_end_id=think_end_id, calls=calls, has_roles=has_roles
        )

    def check_choices(self, num_prompts: int, request: GenerationFields) -> None:
        """Raise InvalidRequest when one request asks for too many answers."""
        limit = self.parts.config.max_prompts_per_request
        if num_prompts > limit:
            raise InvalidRequest(f"{num_prompts} prompts in one request; at most {limit}", param="prompt")
        if num_prompts * request.num_choices > limit:
            raise InvalidRequest(f"{num_prompts} x {request.num_choices} answers in one request; at most {limit}", param="n")

    async def check_grammar(self, exchange: Exchange, request: GenerationFields, asked: AskedGrammar | None) -> GrammarSpec | None:
        """What the answer must look like. Raises InvalidRequest that names the field; what is not enforced is named in a header."""
        if asked is None:
            return None
        check_can_end(request, asked.param)
        checked = await self.parts.grammar_checker.check(asked)
        if checked.warnings:
            text = UNPRINTABLE.sub("?", f"{checked.param}: {'; '.join(checked.warnings)}")
            exchange.extra_headers.append((b"x-grammar-warnings", text[:MAX_WARNING_LENGTH].encode()))
        return checked.spec

    def make_sampling(
        self,
        request: GenerationFields,
        max_tokens: int,
        num_told_tokens: int,
        grammar: GrammarSpec | None,
        bad_words: Sequence[Sequence[int]],
    ) -> SamplingParameters:
        """Sampling parameters of one prompt. Raises InvalidRequest.

        num_told_tokens: prompt tokens whose log-probabilities the request has told by then, once for each time that they are told.
        """
        parts = self.parts
        param = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        check_prompt_logprobs(num_told_tokens, request.num_prompt_logprobs, parts.config.max_prompt_logprobs, param)
        sampling = make_sampling(
            request,
            parts.model,
            max_tokens,
            bad_words=bad_words,
            logprobs_mode=LogprobsMode(parts.config.logprobs_mode),
        )
        return msgspec.structs.replace(sampling, grammar=grammar)

    def make_legs(
        self, request: GenerationFields, name: str, tokens: Sequence[int], sampling: SamplingParameters
    ) -> list[GenerationRequest]:
        """One request per choice of a prompt, each with its own seed. Only the first is asked about the prompt.

        The prompt is packed and its blocks are hashed once. A scored prompt shares no block with anybody.
        """
        packed, salt = pack_tokens(tokens), (request.cache_salt or "").encode()
        is_shared = request.num_choices > 1 or sampling.prompt_logprobs < 0
        keys = self.parts.relay.prompt_keys(packed, salt) if is_shared else ()
        legs = []
        for choice in range(request.num_choices):
            own = msgspec.structs.replace(
                sampling,
                seed=choice_seed(sampling.seed, choice),
                prompt_logprobs=sampling.prompt_logprobs if choice == 0 else -1,
            )
            leg = GenerationRequest(
                request_id=RequestId(f"{name}-{choice}" if choice else name),
                prompt=packed,
                num_prompt_tokens=len(tokens),
                sampling=own,
                cache_salt=salt,
                block_keys=keys if own.prompt_logprobs < 0 else (),
            )
            legs.append(leg)
        return legs


async def tokenise(parts: GatewayParts, num_characters: int, encode: Callable[[], T]) -> T:
    """Run `encode` here, or on a thread when the text is so long that every stream would wait for it."""
    if num_characters < parts.config.tokenize_inline_below_characters:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(None, encode)


def new_response_id(prefix: str) -> str:
    """An id that no other response has: the gateway's request ids are derived from it."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now_unix_s() -> int:
    """Wall-clock time, for `created`."""
    return int(time.time())
