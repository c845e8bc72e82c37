"""POST /v1/completions: raw prompts, one or many, as text or as token ids.

Knows: prompts, echo and the completion objects. Does not know how an answer is driven (`surface.py`).
"""

from typing import Any

from kv_transfer.errors import InvalidRequest
from router.gateway import sse
from router.gateway.answer import TextDelta
from router.gateway.detokeniser import Detokeniser
from router.gateway.exchange import Exchange
from router.gateway.generation import Generation
from router.gateway.sampling import check_context, check_prompt_bytes, make_sampling
from router.gateway.schema import CompletionRequest, parse_prompts, parse_request
from router.gateway.surface import AnswerWriter, GatewayParts, GeneratingEndpoint, new_response_id, now_unix_s


class CompletionEndpoint(GeneratingEndpoint):
    """Completions, streamed or whole; choice i answers prompt i."""

    async def start(self, exchange: Exchange, body: bytes) -> tuple[CompletionRequest, Generation, "CompletionWriter"]:
        """See GeneratingEndpoint."""
        parts = self.parts
        request = parse_request(CompletionRequest, body)
        parts.model.check_name(request.model)
        self.note_ignored(exchange, request)
        prompts = parse_prompts(request.prompt)
        if len(prompts) > parts.config.max_prompts_per_request:
            raise InvalidRequest(f"{len(prompts)} prompts in one request; at most {parts.config.max_prompts_per_request}", param="prompt")
        asked = parts.config.completions_default_max_tokens if request.max_tokens is None else request.max_tokens
        if asked == 0 and not request.echo:
            raise InvalidRequest("max_tokens is 0, so nothing would be answered; ask for at least 1 or set echo", param="max_tokens")
        parts.relay.admit(len(prompts))
        response_id = new_response_id("cmpl")
        requests, answers, echoes = [], [], []
        for index, prompt in enumerate(prompts):
            tokens = await self._tokenise_prompt(prompt)
            check_context(len(tokens), asked, parts.context_tokens, "prompt")
            # Each prompt draws its own numbers, unless the client fixed the seed.
            sampling = make_sampling(request, parts.model, asked)
            requests.append(self.make_request(f"{response_id}-{index}", tokens, sampling, request.cache_salt))
            answers.append(self.make_answer(request, sampling, None))
            echoes.append(self._prompt_text(prompt) if request.echo else "")
        generation = Generation(parts.relay, requests, answers)
        return request, generation, CompletionWriter(parts, request, response_id, echoes)

    async def _tokenise_prompt(self, prompt: str | list[int]) -> list[int]:
        parts = self.parts
        limit = parts.context_tokens
        if isinstance(prompt, list):
            if any(not 0 <= token < parts.model.num_token_ids for token in prompt):
                raise InvalidRequest(f"a token id is outside 0..{parts.model.num_token_ids - 1}", param="prompt")
            return prompt
        check_prompt_bytes(len(prompt.encode()), parts.tokenizer.max_token_bytes, limit, "prompt")
        return await self.tokenise(len(prompt), lambda: parts.tokenizer.encode_raw(prompt))

    def _prompt_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        detokeniser = Detokeniser(self.parts.tokenizer.token_bytes)
        return detokeniser.feed(prompt) + detokeniser.flush()


class CompletionWriter(AnswerWriter):
    """Completion objects. echoes: by choice, what comes before the answer."""

    def __init__(self, parts: GatewayParts, request: CompletionRequest, response_id: str, echoes: list[str]) -> None:
        options = request.stream_options
        self._id = response_id
        self._created_s = now_unix_s()
        self._model = parts.model.name
        self._has_token_ids = bool(request.return_token_ids)
        self._wants_tokens = request.max_tokens != 0
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._chunks = sse.CompletionChunks(response_id, self._created_s, self._model, has_usage=self._has_usage)
        self._echoes = echoes
        self._texts: list[list[str]] = [[echo] for echo in echoes]
        self._tokens: list[list[int]] = [[] for _ in echoes]

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output, num_cached, _ = self.generation.count_usage()
        return sse.usage_object(num_prompt, num_output, num_cached, None)

    def open(self) -> bytes:
        """See AnswerWriter. Without any token wanted this is all of the answer."""
        usage = self._usage() if self._has_running_usage else None
        reason = None if self._wants_tokens else "length"
        return b"".join(
            self._chunks.text(index, echo, reason, usage) for index, echo in enumerate(self._echoes) if echo or reason is not None
        )

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """See AnswerWriter."""
        token_ids = delta.tokens if self._has_token_ids else None
        if not delta.content and not token_ids and delta.finish_reason is None:
            return b""
        usage = self._usage() if self._has_running_usage else None
        return self._chunks.text(index, delta.content, delta.finish_reason, usage, token_ids)

    def usage(self) -> bytes:
        """See AnswerWriter."""
        return self._chunks.usage(self._usage()) if self._has_usage else b""

    def collect(self, index: int, delta: TextDelta) -> None:
        """See AnswerWriter."""
        self._texts[index].append(delta.content)
        self._tokens[index] += delta.tokens

    def body(self) -> bytes:
        """See AnswerWriter."""
        choices = [
            ("".join(texts), choice.answer.finish_reason if self._wants_tokens else "length")
            for texts, choice in zip(self._texts, self.generation.choices, strict=True)
        ]
        token_ids = self._tokens if self._has_token_ids else None
        return sse.completion_body(self._id, self._created_s, self._model, choices, self._usage(), token_ids)
