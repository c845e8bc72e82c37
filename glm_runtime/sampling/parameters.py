"""What sampling parameters ask for, and which values they may have.

Knows: ranges, and which work each parameter makes. Does not know logits. The values themselves travel as
`kv_transfer.request_values.SamplingParameters`.
"""

from kv_transfer.errors import InvalidRequest
from kv_transfer.request_values import SamplingParameters

GREEDY_BELOW_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
"""Most alternatives per token, OpenAI's limit."""
MOST_TEMPERATURE = 2.0
MOST_REPETITION_PENALTY = 10.0
MOST_PENALTY = 2.0
MOST_BIAS = 100.0
"""The gateway's bounds (`router/gateway/schema.py`), which hold for whoever else asks a worker: beyond them logits may overflow."""


def is_greedy(given: SamplingParameters) -> bool:
    """Whether the most probable token is taken."""
    return given.temperature < GREEDY_BELOW_TEMPERATURE


def has_penalties(given: SamplingParameters) -> bool:
    """Whether a token's logit depends on how often it has come."""
    return given.repetition_penalty != 1.0 or given.frequency_penalty != 0.0 or given.presence_penalty != 0.0


def reads_history(given: SamplingParameters) -> bool:
    """Whether a row needs a `TokenHistory`."""
    return has_penalties(given) or bool(given.bad_words)


def has_processors(given: SamplingParameters, token_index: int) -> bool:
    """Whether anything changes this row's logits before the temperature does. One expression: it is asked of every row of every step."""
    return bool(
        given.logit_bias
        or given.allowed_token_ids
        or given.bad_words
        or given.repetition_penalty != 1.0
        or given.frequency_penalty != 0.0
        or given.presence_penalty != 0.0
        or (token_index < given.min_tokens and given.stop_token_ids)
    )


def bans_end(given: SamplingParameters, token_index: int) -> bool:
    """Whether output token `token_index` may not be one that ends the output."""
    return token_index < given.min_tokens and bool(given.stop_token_ids)


def check_sampling(given: SamplingParameters, vocab_size: int) -> None:
    """Raise InvalidRequest that names the parameter for a value out of its range."""
    for name, is_right, rule in (
        ("temperature", 0 <= given.temperature <= MOST_TEMPERATURE, f"between 0 and {MOST_TEMPERATURE}"),
        ("top_p", 0 < given.top_p <= 1, "above 0 and at most 1"),
        ("top_k", given.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= given.min_p <= 1, "between 0 and 1"),
        ("min_tokens", 0 <= given.min_tokens <= given.max_tokens, f"between 0 and max_tokens, which is {given.max_tokens}"),
        ("repetition_penalty", 0 < given.repetition_penalty <= MOST_REPETITION_PENALTY, f"above 0 and at most {MOST_REPETITION_PENALTY}"),
        ("frequency_penalty", abs(given.frequency_penalty) <= MOST_PENALTY, f"between -{MOST_PENALTY} and {MOST_PENALTY}"),
        ("presence_penalty", abs(given.presence_penalty) <= MOST_PENALTY, f"between -{MOST_PENALTY} and {MOST_PENALTY}"),
        ("logprobs", -1 <= given.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ("prompt_logprobs", -1 <= given.prompt_logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ):
        if not is_right:
            raise InvalidRequest(f"{name} is {getattr(given, name)}; it must be {rule}", param=name)
    if not all(abs(value) <= MOST_BIAS for _, value in given.logit_bias):
        raise InvalidRequest(f"a value of logit_bias does not lie between -{MOST_BIAS} and {MOST_BIAS}", param="logit_bias")
    if not all(given.bad_words):
        raise InvalidRequest("a bad word has no tokens", param="bad_words")
    for name, ids in (
        ("logit_bias", [token for token, _ in given.logit_bias]),
        ("allowed_token_ids", given.allowed_token_ids),
        ("stop_token_ids", given.stop_token_ids),
        ("bad_words", [token for word in given.bad_words for token in word]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"{name} has token ids from {min(ids)} to {max(ids)}; this model's are 0 to {vocab_size - 1}", param=name)
    if len({token for token, _ in given.logit_bias}) != len(given.logit_bias):
        raise InvalidRequest("logit_bias names a token twice", param="logit_bias")
