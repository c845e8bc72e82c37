"""Where a request goes: one cost in one unit, tokens of work.

Decode is chosen first, because it holds the request for its whole life; then a prefill worker among those whose pair with it is up.
Knows: the cost and the tie-break. Does not know clocks, sockets or how the views came about (`registry.py`, `prefix_index.py`).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.identity import Incarnation, WorkerId


class WorkerRef(NamedTuple):
    """One start of one worker. A restarted worker is another one: nothing it was told before holds."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCandidate:
    """A usable prefill worker as this request sees it.

    queued_tokens: work in front of the request. overlap_tokens: prompt tokens that its prefix cache probably has.
    """

    ref: WorkerRef
    queued_tokens: int
    overlap_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCandidate:
    """A usable decode worker as this request sees it. pairs: prefill workers that it can pull from now."""

    ref: WorkerRef
    held_tokens: int
    num_requests: int
    available_tokens: int
    pairs: AbstractSet[WorkerRef]
    overlap_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What is to be placed. num_tokens: prompt and emitted tokens. num_more_tokens: output still to come, at most.

    avoid: workers that failed this request before; they are taken only if there is no other choice.
    """

    num_tokens: int
    num_more_tokens: int
    avoid: AbstractSet[WorkerRef] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The decision. prefill is None when decode prefills by itself. The costs are what was booked, in tokens of work."""

    decode: WorkerRef
    prefill: WorkerRef | None
    prefill_tokens: int
    decode_tokens: int


def choose_pair(
    demand: Demand,
    prefills: Sequence[PrefillCandidate],
    decodes: Sequence[DecodeCandidate],
    *,
    decode_row_tokens: int,
    local_prefill_below_tokens: int,
) -> Placement | None:
    """Choose decode, then prefill. None when no usable pair is there. Ties go to the smaller worker id, always."""
    by_ref = {candidate.ref: candidate for candidate in prefills}
    paired = {decode.ref: [by_ref[ref] for ref in decode.pairs if ref in by_ref] for decode in decodes}
    can_bypass = {decode.ref: demand.num_tokens - decode.overlap_tokens < local_prefill_below_tokens for decode in decodes}
    usable = [decode for decode in decodes if paired[decode.ref] or can_bypass[decode.ref]]
    if not usable:
        return None

    def decode_rank(decode: DecodeCandidate) -> tuple[bool, int, WorkerRef]:
        cost = decode_cost(demand, decode, decode_row_tokens, counts_overlap=can_bypass[decode.ref])
        return decode.ref in demand.avoid, cost, decode.ref

    decode = min(usable, key=decode_rank)
    decode_tokens = demand.num_tokens + decode_row_tokens
    if can_bypass[decode.ref]:
        return Placement(decode=decode.ref, prefill=None, prefill_tokens=0, decode_tokens=decode_tokens)
    prefill = min(paired[decode.ref], key=lambda item: (item.ref in demand.avoid, prefill_cost(demand, item), item.ref))
    uncached = max(demand.num_tokens - prefill.overlap_tokens, 0)
    return Placement(decode=decode.ref, prefill=prefill.ref, prefill_tokens=uncached, decode_tokens=decode_tokens)


def prefill_cost(demand: Demand, candidate: PrefillCandidate) -> int:
    """Tokens that must be computed on this worker before our first token is there."""
    return candidate.queued_tokens + max(demand.num_tokens - candidate.overlap_tokens, 0)


def decode_cost(demand: Demand, candidate: DecodeCandidate, decode_row_tokens: int, *, counts_overlap: bool) -> int:
    """Tokens that share this worker's steps with us, plus those that must first go so that we fit.

    What decode has of the prompt counts only when it would prefill by itself: else it saves a pull, not work.
    """
    shortage = max(demand.num_tokens + demand.num_more_tokens - candidate.available_tokens, 0)
    saved = candidate.overlap_tokens if counts_overlap else 0
    return candidate.held_tokens + candidate.num_requests * decode_row_tokens + shortage - saved
