"""What messages say about one request: how its tokens are drawn, what was drawn, and what decode must know to go on.

Knows: fields and their types. Does not know messages (`messages.py`) or how a token is drawn (`glm_runtime.sampling`).
Adding a field with a default at the end is a minor change; anything else raises `layout.PROTOCOL_MAJOR`.
"""

from enum import Enum, unique

import msgspec

from kv_transfer.grammar import GrammarSpec
from kv_transfer.identity import TransferId


@unique
class FinishReason(Enum):
    """Why a request has no further token."""

    STOP = "stop"
    LENGTH = "length"


@unique
class LogprobsMode(Enum):
    """Of which distribution log-probabilities are told: the model's own, or the one that is drawn from."""

    RAW = "raw"
    PROCESSED = "processed"


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the values that messages carry."""


class SamplingParameters(_Part, frozen=True):
    """How tokens are drawn. Noise is keyed by (seed, token index), so any attempt draws the same.

    temperature: 0 is greedy. top_p in (0, 1]. top_k: 0 is off. seed: the router mints one when the client gave none.
    max_tokens: all output tokens of the request, whatever the attempt. stop_token_ids end the output with STOP and are
    emitted as the last token; they already include the model's own end tokens unless the client asked to ignore those.
    min_p: 0 is off. min_tokens: output tokens before any of stop_token_ids may be drawn. repetition_penalty: 1 is off; of prompt and
    output; the other two: 0 is off; of the output. logit_bias: (token id, what is added to its logit), each id once.
    allowed_token_ids: empty allows all. bad_words: token sequences whose last token is not drawn after the others.
    logprobs, prompt_logprobs: how many of the largest to tell beside the token's own; 0 its own alone, -1 none.
    grammar: what the output must look like; where nothing is left to draw, the other parameters that forbid tokens give way to it.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    grammar: GrammarSpec | None = None


class TokenLogprobs(_Part, frozen=True):
    """Log-probabilities at one place, each rounded to fp32: of the token there, and the largest as (token id, logprob), largest first.

    rank: 1 for the most probable token; equals are ranked by id. The token may be among `top` or not.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class HandoffRecord(_Part, frozen=True):
    """What decode needs beside the blocks, one entry for choice 0 now; schema-versioned, covered by `digest`.

    token: the sample at `first_index`, drawn once by prefill. hidden_state: raw bytes of h_P when the layout has MTP components.
    num_cached_tokens: prompt tokens that prefill took from its prefix cache. digest: `handoff.digest_record` over the rest.
    logprobs: of `token`. prompt_logprobs: of prompt tokens 1, 2 ... ; both only where the request asks for them.
    grammar_digest: of the grammar's state after `token`; decode rebuilds that state by accepting the token once.
    """

    schema: int
    first_index: int
    token: int
    finish: FinishReason | None
    seed: int
    num_cached_tokens: int
    hidden_state: bytes | None = None
    num_mtp_tokens: int = 0
    choice: int = 0
    digest: bytes = b""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    grammar_digest: bytes = b""


class TokenDelta(_Part, frozen=True):
    """Tokens of one request from `first_index` on; `finish` says that the last of them ends the output.

    logprobs: one entry per token, or none at all. prompt_logprobs: of prompt tokens 1, 2 ... , in the delta that has output token 0.
    """

    transfer: TransferId
    first_index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
