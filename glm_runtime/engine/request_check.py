"""Whether a request can be computed here at all. A worker checks what the router sends: a bad token id would stop its engine."""

from dataclasses import dataclass

from glm_runtime.sampling.parameters import check_sampling
from kv_transfer.errors import InvalidRequest, PromptTooLong
from kv_transfer.identity import TOKEN_BYTES, PackedTokens, unpack_tokens
from kv_transfer.messages import SamplingParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What one worker can compute. capacity_tokens: tokens that its whole pool holds."""

    vocab_size: int
    max_model_len_tokens: int
    capacity_tokens: int

    @property
    def max_scored_tokens(self) -> int:
        """Longest prompt of which only the log-probabilities are wanted: the token drawn after it is not part of anything."""
        return min(self.max_model_len_tokens, self.capacity_tokens)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence, prompt and output: the cache of its very last token is never stored."""
        return min(self.max_model_len_tokens, self.capacity_tokens + 1)


def check_request(
    packed: PackedTokens, *, num_prompt_tokens: int, first_index: int, sampling: SamplingParameters, limits: RequestLimits
) -> None:
    """Raise InvalidRequest, or PromptTooLong, for what no attempt here could compute.

    packed: prompt, then the `first_index` tokens that earlier attempts have emitted.
    """
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are no packed tokens: each takes {TOKEN_BYTES}")
    tokens = unpack_tokens(packed)
    if num_prompt_tokens < 1 or first_index < 0 or len(tokens) != num_prompt_tokens + first_index:
        raise InvalidRequest(
            f"{len(tokens)} tokens were sent for a prompt of {num_prompt_tokens} and {first_index} emitted ones; a prompt has one or more"
        )
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        raise InvalidRequest(f"token ids lie between {min(tokens)} and {max(tokens)}; this model's are 0 to {limits.vocab_size - 1}")
    if sampling.max_tokens <= first_index:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens} and {first_index} are emitted already: nothing is left to compute")
    is_scored_alone = sampling.prompt_logprobs >= 0 and sampling.max_tokens == 1 and first_index == 0
    fits = is_scored_alone and num_prompt_tokens <= limits.max_scored_tokens
    if not fits and num_prompt_tokens + sampling.max_tokens > limits.max_sequence_tokens:
        raise PromptTooLong(
            f"prompt has {num_prompt_tokens} tokens and asks for {sampling.max_tokens} more; a sequence may have "
            f"{limits.max_sequence_tokens} here. Shorten the prompt or lower max_tokens."
        )
    check_sampling(sampling, limits.vocab_size)
