"""POST /v1/completions: raw prompts, one or many, as text or as token ids.

Knows: prompts, echo and the completion objects. Does not know how an answer is driven (`surface.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.errors import InvalidRequest
from kv_transfer.messages import TokenLogprobs
from router.gateway import sse
from router.gateway.answer import TextDelta
from router.gateway.detokeniser import Detokeniser
from router.gateway.exchange import Exchange
from router.gateway.generation import Generation
from router.gateway.grammar_fields import find_grammar
from router.gateway.logprobs import CompletionLogprobs, join_completion_logprobs, prompt_logprobs
from router.gateway.sampling import check_context, check_prompt_bytes
from router.gateway.schema import CompletionRequest, parse_prompts, parse_request
from router.gateway.surface import AnswerWriter, GatewayParts, GeneratingEndpoint, new_response_id, now_unix_s
from router.generation_request import GenerationRequest


class CompletionEndpoint(GeneratingEndpoint):
    """Completions, streamed or whole; choice i answers prompt i."""

    async def start(self, exchange: Exchange, body: bytes) -> tuple[CompletionRequest, Generation, "CompletionWriter"]:
        """See GeneratingEndpoint."""
        parts = self.parts
        request = parse_request(CompletionRequest, body)
        parts.model.check_name(request.model)
        self.note_ignored(exchange, request)
        prompts = parse_prompts(request.prompt)
        self.check_choices(len(prompts), request)
        grammar = await self.check_grammar(exchange, request, find_grammar(request))
        asked = parts.config.completions_default_max_tokens if request.max_tokens is None else request.max_tokens
        if asked == 0 and not request.echo:
            raise InvalidRequest("max_tokens is 0, so nothing would be answered; ask for at least 1 or set echo", param="max_tokens")
        # Prompts are scored on the way to a first token: where none is wanted, one is drawn and left out, and the context need not hold it.
        max_tokens = max(asked, 1) if request.num_prompt_logprobs >= 0 else asked
        parts.relay.admit(len(prompts) * request.num_choices)
        response_id = new_response_id("cmpl")
        bad_words = await self.tokenise_bad_words(request)
        num_told_tokens = 0
        legs: list[GenerationRequest] = []
        answers, echoes = [], []
        for index, prompt in enumerate(prompts):
            tokens = await self._tokenise_prompt(prompt)
            check_context(len(tokens), asked, parts.context_tokens, "prompt")
            # Each prompt draws its own numbers, unless the client fixed the seed.
            num_told_tokens += len(tokens) * request.num_choices
            sampling = self.make_sampling(request, max_tokens, num_told_tokens, grammar, bad_words)
            legs += self.make_legs(request, f"{response_id}-{index}", tokens, sampling)
            answers += [self.make_answer(request, sampling, None) for _ in range(request.num_choices)]
            echoes.append(EchoedPrompt(tokens, self._prompt_text(prompt) if request.echo else ""))
        generation = Generation(parts.relay, legs, answers, num_choices=request.num_choices)
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


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """One prompt; text is what is shown of it, nothing without `echo`."""

    tokens: Sequence[int]
    text: str


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far. is_echoed: whether the prompt has been shown."""

    prompt: EchoedPrompt
    told: CompletionLogprobs
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_echoed: bool = False


class CompletionWriter(AnswerWriter):
    """Completion objects. prompts: one for each prompt; choices of one prompt are adjacent."""

    def __init__(self, parts: GatewayParts, request: CompletionRequest, response_id: str, prompts: Sequence[EchoedPrompt]) -> None:
        options = request.stream_options
        self._id = response_id
        self._created_s = now_unix_s()
        self._model = parts.model.name
        self._has_token_ids = bool(request.return_token_ids)
        self._wants_tokens = request.max_tokens != 0
        self._has_echo = bool(request.echo)
        self._has_logprobs = request.num_logprobs >= 0
        self._has_prompt_logprobs = request.prompt_logprobs is not None
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._chunks = sse.CompletionChunks(response_id, self._created_s, self._model, has_usage=self._has_usage)
        self._texts = parts.token_texts
        self._num_choices = request.num_choices
        self._choices = [_Choice(prompt, CompletionLogprobs(self._texts)) for prompt in prompts for _ in range(self._num_choices)]

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output, num_cached, _ = self.generation.count_usage()
        return sse.usage_object(num_prompt, num_output if self._wants_tokens else 0, num_cached, None)

    def open(self) -> bytes:
        """See AnswerWriter. Without any token wanted this is all of the answer; an echo with log-probabilities waits for them."""
        return b"" if self._has_echo and self._has_logprobs else b"".join([self._echo(index) for index in range(len(self._choices))])

    def _echo(self, index: int) -> bytes:
        choice = self._choices[index]
        if choice.is_echoed or (self._wants_tokens and not choice.prompt.text):
            return b""
        choice.is_echoed = True
        reason = None if self._wants_tokens else "length"
        usage = self._usage() if self._has_running_usage else None
        return self._chunks.text(index, choice.prompt.text, reason, usage, logprobs=self._echo_logprobs(index))

    def _echo_logprobs(self, index: int) -> dict[str, Any] | None:
        if not (self._has_echo and self._has_logprobs):
            return None
        choice = self._choices[index]
        return choice.told.prompt(choice.prompt.tokens, self._prompt_logprobs(index))

    def _prompt_logprobs(self, index: int) -> Sequence[TokenLogprobs]:
        """The first choice of a prompt has them for all."""
        return self.generation.choices[index - index % self._num_choices].prompt_logprobs

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """See AnswerWriter."""
        echo = self._echo(index)
        if not self._wants_tokens:
            return echo
        token_ids = delta.tokens if self._has_token_ids else None
        told = self._choices[index].told.answer(delta.tokens, delta.logprobs) if self._has_logprobs and delta.tokens else None
        if not delta.content and not token_ids and told is None and delta.finish_reason is None:
            return echo
        usage = self._usage() if self._has_running_usage else None
        return echo + self._chunks.text(index, delta.content, delta.finish_reason, usage, token_ids, told)

    def usage(self) -> bytes:
        """See AnswerWriter."""
        return self._chunks.usage(self._usage()) if self._has_usage else b""

    def collect(self, index: int, delta: TextDelta) -> None:
        """See AnswerWriter."""
        choice = self._choices[index]
        if self._has_logprobs and not choice.is_echoed:
            choice.is_echoed = True
            choice.logprobs += [told] if (told := self._echo_logprobs(index)) is not None else []
        if self._wants_tokens:
            choice.texts.append(delta.content)
            choice.tokens += delta.tokens
            if self._has_logprobs:
                choice.logprobs.append(choice.told.answer(delta.tokens, delta.logprobs))

    def body(self) -> bytes:
        """See AnswerWriter."""
        choices = [self._choice(index) for index in range(len(self._choices))]
        return sse.completion_body(self._id, self._created_s, self._model, choices, self._usage())

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        body: dict[str, Any] = {
            "index": index,
            "text": choice.prompt.text + "".join(choice.texts),
            "logprobs": join_completion_logprobs(choice.logprobs),
            "finish_reason": self.generation.choices[index].answer.finish_reason if self._wants_tokens else "length",
        }
        if self._has_token_ids:
            body["token_ids"] = choice.tokens
        if self._has_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._texts, choice.prompt.tokens, self._prompt_logprobs(index))
        return body
