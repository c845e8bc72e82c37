"""From a validated request to sampling parameters, within the model's limits.

Knows: the checkpoint's defaults, end tokens and context length. Does not know text.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.errors import InvalidRequest, ModelNotFound, PromptTooLong
from kv_transfer.messages import LogprobsMode, SamplingParameters
from router.gateway.schema import GenerationFields
from router.gateway.tokenizer import TextTokenizer

SEED_MASK = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What is served, as its checkpoint describes it. max_model_len_tokens: prompt + output."""

    name: str
    max_model_len_tokens: int
    num_token_ids: int
    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def check_name(self, name: str) -> None:
        """Raise ModelNotFound for any other model."""
        if name != self.name:
            raise ModelNotFound(f"the model {name!r} does not exist here; this server serves {self.name!r}", param="model")


def describe_model(name: str, tokenizer: TextTokenizer, max_model_len_tokens: int) -> ServedModel:
    """The served model; `max_model_len_tokens` 0 takes the checkpoint's, and never exceeds it."""
    limits = [limit for limit in (max_model_len_tokens, tokenizer.max_model_len_tokens) if limit > 0]
    defaults = tokenizer.generation_defaults
    is_greedy = defaults.get("do_sample") is False
    return ServedModel(
        name=name,
        max_model_len_tokens=min(limits, default=0),
        num_token_ids=tokenizer.num_token_ids,
        eos_token_ids=tokenizer.eos_token_ids,
        temperature=0.0 if is_greedy else float(_given(defaults, "temperature", 1.0)),
        top_p=float(_given(defaults, "top_p", 1.0)),
        top_k=int(_given(defaults, "top_k", 0)),
    )


def _given(defaults: dict[str, Any], name: str, otherwise: float) -> Any:
    value = defaults.get(name)
    return otherwise if value is None else value


def check_context(num_prompt_tokens: int, max_tokens: int | None, limit_tokens: int, param: str) -> int:
    """How many tokens may be generated: what was asked for, else the rest of the context. Raises PromptTooLong, InvalidRequest."""
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty; at least one token is needed", param=param)
    room_tokens = limit_tokens - num_prompt_tokens
    if max_tokens is None and room_tokens < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and the model's context is {limit_tokens}; shorten the prompt", param=param
        )
    if max_tokens is not None and max_tokens > room_tokens:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {max_tokens} more, together "
            f"{num_prompt_tokens + max_tokens}; the model's context is {limit_tokens}. Shorten the prompt or lower max_tokens.",
            param=param,
        )
    return room_tokens if max_tokens is None else max_tokens


def check_prompt_bytes(num_bytes: int, max_token_bytes: int, limit_tokens: int, param: str) -> None:
    """Refuse a text that cannot fit however well it compresses, before any time is spent on it. Raises PromptTooLong."""
    at_least = -(-num_bytes // max_token_bytes)
    if at_least > limit_tokens:
        raise PromptTooLong(f"the prompt has at least {at_least} tokens and the model's context is {limit_tokens}; shorten it", param=param)


def make_sampling(
    request: GenerationFields,
    model: ServedModel,
    max_tokens: int,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    logprobs_mode: LogprobsMode = LogprobsMode.RAW,
) -> SamplingParameters:
    """Sampling parameters with every default filled in. The seed is minted here, so that every attempt draws the same.

    bad_words: the request's, as tokens. Raises InvalidRequest for what only the model's limits show to be wrong.
    """
    end_ids = () if request.ignore_eos else model.eos_token_ids
    top_k = model.top_k if request.top_k is None else request.top_k
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens} and at most {max_tokens} tokens may be generated", param="min_tokens")
    bias = {int(key): value for key, value in (request.logit_bias or {}).items()}
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    stop_ids = tuple(request.stop_token_ids or ())
    _check_ids(stop_ids, model, "stop_token_ids")
    _check_ids(bias, model, "logit_bias")
    _check_ids(allowed, model, "allowed_token_ids")
    return SamplingParameters(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK,
        temperature=_or(request.temperature, model.temperature),
        top_p=_or(request.top_p, model.top_p),
        top_k=max(top_k, 0),
        stop_token_ids=tuple(dict.fromkeys((*end_ids, *stop_ids))),
        min_p=_or(request.min_p, 0.0),
        min_tokens=min_tokens,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=tuple(sorted(bias.items())),
        allowed_token_ids=allowed,
        bad_words=tuple(map(tuple, bad_words)),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        logprobs_mode=logprobs_mode,
    )


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _check_ids(ids: Iterable[int], model: ServedModel, param: str) -> None:
    for token in ids:
        if not 0 <= token < model.num_token_ids:
            raise InvalidRequest(f"{param}: {token} is no token id; this model's are 0 to {model.num_token_ids - 1}", param=param)


def check_prompt_logprobs(num_prompt_tokens: int, num_each: int, limit: int, param: str) -> None:
    """Raise InvalidRequest when more log-probabilities of prompts are asked for than one answer may carry; `param` asks for them."""
    wanted = num_prompt_tokens * (num_each + 1)
    if num_each >= 0 and wanted > limit:
        raise InvalidRequest(
            f"log-probabilities of {num_prompt_tokens} prompt tokens are asked for, over all prompts and answers, and {num_each + 1} at "
            f"each, together {wanted}; this server tells at most {limit}. Ask for fewer or shorten the prompt.",
            param=param,
        )


def tokenise_bad_words(words: Sequence[str], tokenizer: TextTokenizer) -> list[list[int]]:
    """Each word at the start of a text and after a space, which are different tokens, each sequence once."""
    spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip()) if word.strip()]
    found = dict.fromkeys(tuple(ids) for ids in tokenizer.encode_runs(spellings)) if spellings else {}
    return [list(ids) for ids in found if ids]


def check_can_end(request: GenerationFields, constraint: str) -> None:
    """Raise InvalidRequest for a constrained answer that no end token may end. constraint: the field that asks for it."""
    if request.ignore_eos:
        raise InvalidRequest(f"an answer under {constraint} is complete at an end token; leave out ignore_eos", param="ignore_eos")


def ends_at_roles(request: GenerationFields) -> bool:
    """Whether a role token ends a chat's answer: where end tokens do, which workers otherwise hold back."""
    return not request.ignore_eos and not request.min_tokens


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several answers to a prompt: the first has the request's own, so asking for more does not change it."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(b"choice" + seed.to_bytes(8, "little") + choice.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little") & SEED_MASK
