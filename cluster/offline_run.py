"""Generation in this process, without a cluster: what `glm-cluster run` does, and what a cluster's answers are compared with.

Knows: prompts are API requests, so defaults, limits and texts are exactly the gateway's. Does not know where prompts come from
(`offline_prompts.py`) or where answers go (`cli_run.py`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from cluster.offline_prompts import GivenPrompt
from glm_runtime.checkpoint import check_checkpoint
from glm_runtime.config import GlmConfig
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.weight_memory import expected_weight_bytes
from kv_transfer.errors import ConfigError, InvalidRequest, UnsupportedParameter
from kv_transfer.messages import FinishReason, GrammarSpec, SamplingParameters
from router.gateway.answer import Answer, TextDelta, make_answer
from router.gateway.chat_messages import plain_messages, template_variables
from router.gateway.chat_template import END_OF_THINKING, START_OF_THINKING, ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.grammar_check import check
from router.gateway.grammar_fields import find_grammar
from router.gateway.grammar_frames import CheckRequest
from router.gateway.reasoning import find_think_end
from router.gateway.sampling import (
    ServedModel,
    check_can_end,
    check_context,
    describe_model,
    ends_at_roles,
    make_sampling,
    tokenise_bad_words,
)
from router.gateway.schema import ChatRequest, CompletionRequest, GenerationFields, parse_prompts, parse_request
from router.gateway.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 256
MODEL_NAME = "glm"
MIB = 1 << 20

OnDelta = Callable[[int, TextDelta], None]
"""Called with (number of the prompt, new text of its answer) as tokens are drawn."""
OnCount = Callable[[int, int], None]
"""Called with (output tokens drawn so far, output tokens there can be at most)."""


@dataclass(slots=True)
class OfflineAnswer:
    """One prompt, tokenised, and its answer as it grows."""

    place: str
    prompt_tokens: list[int]
    sampling: SamplingParameters
    text: Answer
    tokens: list[int] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""

    def take(self, token: int) -> TextDelta:
        """Add a token. Returns the text that it completes; its finish_reason is set with the last one."""
        self.tokens.append(token)
        finish = None
        if token in self.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif len(self.tokens) == self.sampling.max_tokens:
            finish = FinishReason.LENGTH
        delta = self.text.feed([token], finish)
        self.reasoning += delta.reasoning
        self.content += delta.content
        return delta


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatistics:
    """Times of one run; generate_s begins with the first step and holds first_token_s."""

    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    load_s: float
    first_token_s: float
    generate_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all prompts per second, prefill included."""
        return self.num_output_tokens / self.generate_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens after the first per second; only one prompt alone decodes undisturbed."""
        rest_s = self.generate_s - self.first_token_s
        return (self.num_output_tokens - 1) / rest_s if self.num_prompts == 1 and self.num_output_tokens > 1 and rest_s > 0 else None


class OfflineRun:
    """A checkpoint's text side first, so that mistakes are told before weights are read; then its model."""

    def __init__(self, runtime_config: RuntimeConfig) -> None:
        """Raises ConfigError as `check_checkpoint`, and when the model would not fit into memory."""
        self._runtime_config = runtime_config
        checkpoint = Path(runtime_config.checkpoint)
        self._config = check_checkpoint(checkpoint)
        check_memory(self._config, runtime_config)
        self._tokenizer = TextTokenizer(checkpoint)
        self._encoder = ChatEncoder(ChatTemplate(read_pinned_template()), self._tokenizer, control_tokens_in_text=False)
        self._model: ServedModel = describe_model(MODEL_NAME, self._tokenizer, runtime_config.max_model_len_tokens or 0)

    def prepare(
        self, given: Sequence[GivenPrompt], defaults: Mapping[str, Any], *, is_raw: bool, system: str | None = None
    ) -> list[OfflineAnswer]:
        """Tokenise prompts and fill in their parameters: a line's own fields, then `defaults`, then the checkpoint's.

        is_raw: text is the prompt itself, not a user's message. system: a message before each of those.
        Raises ConfigError naming the prompt's place.
        """
        answers = []
        for prompt in given:
            try:
                answers.append(self._prepare(prompt, defaults, is_raw, system))
            except InvalidRequest as error:
                raise ConfigError(error.message, path=prompt.place) from None
        return answers

    def _prepare(self, given: GivenPrompt, defaults: Mapping[str, Any], is_raw: bool, system: str | None) -> OfflineAnswer:
        body = {"model": MODEL_NAME, **{name: value for name, value in defaults.items() if value is not None}, **given.body}
        is_chat = "messages" in body or not (is_raw or isinstance(body["prompt"], list))
        if not is_chat:
            if system is not None:
                raise InvalidRequest("is a raw prompt, which has no system message; leave --system out")
            return self._prepare_raw(given.place, body)
        if is_raw:
            raise InvalidRequest("has messages, which --raw does not render; give prompt or leave --raw out")
        if "prompt" in body:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if system is not None:
            body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
        request = parse_request(ChatRequest, json.dumps(body).encode())
        if request.tools:
            raise InvalidRequest("has tools, which only the server can offer; leave them out", param="tools")
        variables = template_variables(request.reasoning_effort, request.chat_template_kwargs)
        tokens = self._encoder.encode(self._encoder.render(plain_messages(request.messages), variables))
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        control_id = self._tokenizer.control_id
        think_end_id = find_think_end(tokens, control_id(START_OF_THINKING), control_id(END_OF_THINKING))
        return self._make_answer(given.place, tokens, request, asked, think_end_id)

    def _prepare_raw(self, place: str, body: Mapping[str, Any]) -> OfflineAnswer:
        request = parse_request(CompletionRequest, json.dumps(body).encode())
        prompt, *others = parse_prompts(request.prompt)
        if others:
            raise InvalidRequest("has several prompts; give each a line of its own")
        tokens = self._tokenizer.encode_raw(prompt) if isinstance(prompt, str) else prompt
        if any(not 0 <= token < self._config.vocab_size for token in tokens):
            raise InvalidRequest(f"has a token id outside 0..{self._config.vocab_size - 1}")
        return self._make_answer(place, tokens, request, request.max_tokens, None)

    def _make_answer(
        self, place: str, tokens: list[int], request: ChatRequest | CompletionRequest, asked: int | None, think_end_id: int | None
    ) -> OfflineAnswer:
        for name, is_asked in (("n", request.num_choices > 1), ("logprobs", max(request.num_logprobs, request.num_prompt_logprobs) >= 0)):
            if is_asked:
                raise UnsupportedParameter(f"{name} with this value is not supported by this command; leave it out", param=name)
        room = check_context(len(tokens), asked, self._model.max_model_len_tokens, "prompt")
        max_tokens = min(room, DEFAULT_MAX_TOKENS) if asked is None else asked
        if max_tokens < 1:
            raise InvalidRequest("asks for no tokens; max_tokens must be at least 1")
        bad_words = tokenise_bad_words(request.bad_words or (), self._tokenizer)
        sampling = make_sampling(request, self._model, max_tokens, bad_words=bad_words)
        sampling = msgspec.structs.replace(sampling, grammar=_read_grammar(request, think_end_id))
        has_roles = isinstance(request, ChatRequest) and ends_at_roles(request)
        text = make_answer(self._tokenizer, sampling, stops=request.stop_strings, think_end_id=think_end_id, has_roles=has_roles)
        return OfflineAnswer(place, tokens, sampling, text)

    def load(self, on_progress: Callable[[int, int], None] | None = None) -> GlmRuntime:
        """Read the weights; reports bytes. Takes seconds to minutes."""
        return GlmRuntime.load(self._runtime_config, on_progress)


def _read_grammar(request: GenerationFields, think_end_id: int | None) -> GrammarSpec | None:
    """What the answer must look like, checked here and now: nobody else waits for this process. Raises InvalidRequest."""
    asked = find_grammar(request)
    if asked is None:
        return None
    check_can_end(request, asked.param)
    reply = check(CheckRequest(asked.notation.value, asked.text, asked.is_lenient, limit_s=math.inf))
    if reply.spec is None:
        raise InvalidRequest(f"{asked.param} cannot be used: {' '.join(reply.error.split())}", param=asked.param)
    return msgspec.structs.replace(reply.spec, after_token=-1 if think_end_id is None else think_end_id)


def answer_all(
    runtime: GlmRuntime,
    answers: Sequence[OfflineAnswer],
    *,
    load_s: float,
    batch_size: int,
    on_delta: OnDelta | None = None,
    on_count: OnCount | None = None,
) -> RunStatistics:
    """Generate every answer. Raises PromptTooLong, before anything is computed, when one does not fit into the cache."""
    started_at_s = time.monotonic()
    first_token_s = 0.0
    num_drawn, num_expected = 0, sum(answer.sampling.max_tokens for answer in answers)

    def take(number: int, token: int) -> bool:
        nonlocal first_token_s, num_drawn, num_expected
        first_token_s = first_token_s or time.monotonic() - started_at_s
        answer = answers[number]
        delta = answer.take(token)
        num_drawn += 1
        if delta.finish_reason is not None:
            num_expected -= answer.sampling.max_tokens - len(answer.tokens)
        if on_delta is not None:
            on_delta(number, delta)
        if on_count is not None:
            on_count(num_drawn, num_expected)
        return delta.finish_reason is None

    prompts, sampling = [answer.prompt_tokens for answer in answers], [answer.sampling for answer in answers]
    generate(runtime, prompts, sampling, max_batch_sequences=batch_size, on_token=take)
    return RunStatistics(
        num_prompts=len(answers),
        num_prompt_tokens=sum(map(len, prompts)),
        num_output_tokens=num_drawn,
        load_s=load_s,
        first_token_s=first_token_s,
        generate_s=time.monotonic() - started_at_s,
    )


def check_memory(config: GlmConfig, runtime_config: RuntimeConfig) -> None:
    """Raise ConfigError when the weights alone, in the dtype they are computed in, exceed the memory that is available now."""
    needed, available = expected_weight_bytes(config, runtime_config), psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"the weights take {needed // MIB} MiB in memory, {available // MIB} MiB are available", path=str(runtime_config.checkpoint)
        )


def describe_run(answers: Sequence[OfflineAnswer], statistics: RunStatistics) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    return {
        "answers": [
            {
                "place": answer.place,
                "num_prompt_tokens": len(answer.prompt_tokens),
                "token_ids": answer.tokens,
                "reasoning": answer.reasoning,
                "text": answer.content,
                "finish_reason": answer.text.finish_reason,
                "seed": answer.sampling.seed,
            }
            for answer in answers
        ],
        "statistics": {
            "num_prompt_tokens": statistics.num_prompt_tokens,
            "num_output_tokens": statistics.num_output_tokens,
            "load_s": round(statistics.load_s, 3),
            "first_token_s": round(statistics.first_token_s, 4),
            "generate_s": round(statistics.generate_s, 4),
            "tokens_per_s": round(statistics.tokens_per_s, 2),
        },
    }


def render_statistics(statistics: RunStatistics) -> str:
    """One line for the end of a run."""
    line = (
        f"{statistics.num_prompt_tokens} prompt and {statistics.num_output_tokens} output tokens in {statistics.generate_s:.2f} s: "
        f"{statistics.tokens_per_s:.1f} tokens/s"
    )
    if statistics.decode_tokens_per_s is not None:
        line += f" (first token after {statistics.first_token_s:.2f} s, then {statistics.decode_tokens_per_s:.1f} tokens/s)"
    return f"{line}; loaded in {statistics.load_s:.1f} s"
