"""What a client wants, in tokens, and what the two workers of an attempt are told of it.

Knows: the messages that open a hand-off. Does not know which attempt is current or what has become of it (`request_flow.py`).
"""

from collections.abc import Sequence

import msgspec

from kv_transfer.identity import PackedTokens, RequestId, TransferId, pack_tokens
from kv_transfer.messages import OpenSink, SamplingParameters, StartSource, WorkerAddress


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants, in tokens. `sampling.seed` is set: the router's edge minted one if the client gave none."""

    request_id: RequestId
    prompt: PackedTokens
    num_prompt_tokens: int
    sampling: SamplingParameters
    cache_salt: bytes = b""
    priority: int = 0
    block_keys: tuple[bytes, ...] = ()


def open_message(
    request: GenerationRequest, transfer: TransferId, output: Sequence[int], deadline_s: float, source: WorkerAddress | None
) -> OpenSink:
    """What decode is told. output: the tokens that earlier attempts have emitted; source: None where decode prefills itself."""
    is_scored = request.sampling.prompt_logprobs >= 0 and not output  # log-probabilities of a prompt come with the first token
    return OpenSink(
        transfer=transfer,
        tokens=PackedTokens(request.prompt + pack_tokens(output)) if output else request.prompt,
        num_prompt_tokens=request.num_prompt_tokens,
        first_index=len(output),
        cache_salt=_salt_of_scores(request, transfer) if is_scored else request.cache_salt,
        sampling=_without_scores(request.sampling) if not is_scored else request.sampling,
        priority=request.priority,
        deadline_s=deadline_s,
        source=source,
    )


def start_message(opened: OpenSink, sink: WorkerAddress) -> StartSource:
    """What prefill is told of the same attempt; from which token on it is needed, decode says first."""
    return StartSource(
        transfer=opened.transfer,
        tokens=opened.tokens,
        num_prompt_tokens=opened.num_prompt_tokens,
        first_index=opened.first_index,
        need_from=0,
        cache_salt=opened.cache_salt,
        sampling=opened.sampling,
        priority=opened.priority,
        deadline_s=opened.deadline_s,
        sink=sink,
    )


def _salt_of_scores(request: GenerationRequest, transfer: TransferId) -> bytes:
    """A prompt is scored from logits, which no cache has: under a salt of its own every worker computes all of it."""
    return request.cache_salt + f"\0score {transfer.request_id} {transfer.attempt}".encode()


def _without_scores(sampling: SamplingParameters) -> SamplingParameters:
    return sampling if sampling.prompt_logprobs < 0 else msgspec.structs.replace(sampling, prompt_logprobs=-1)
