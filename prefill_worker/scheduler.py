"""What a prefill worker does in its next step: whom it admits, and which chunks it computes.

Knows: the order of requests, the rule of admission, and the budget of a step.
Does not know: where blocks or tokens live, what time it is, or how a step is run (`engine.py`).

A request is admitted only when every block of its prompt can be allocated at once, and requests are admitted strictly in
order. So a computing request never waits for a block, two half-computed prompts can never block each other, and nobody is
overtaken into starvation; the price is that a long prompt at the head waits until enough blocks are let go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from glm_runtime.engine.chunk_plan import Chunk, PrefillDemand, plan_chunks
from kv_transfer.identity import SequenceId


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLimits:
    """What a step may take. `max_step_tokens` is at least `block_size_tokens`, else no chunk would ever fit."""

    max_step_tokens: int
    max_computing: int
    block_size_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingPrefill:
    """A request that has no blocks yet. `num_new_blocks`: what admitting it takes of the available blocks of each home (`BlockPool`)."""

    sequence_id: SequenceId
    num_cached_tokens: int
    num_tokens: int
    num_new_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillView:
    """All that `decide` looks at; both tuples in order of urgency (`urgency`)."""

    computing: tuple[PrefillDemand, ...]
    waiting: tuple[WaitingPrefill, ...]
    num_available_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """Admit these, in this order, then compute these chunks. Chunks may belong to requests that this plan admits."""

    admit: tuple[SequenceId, ...]
    chunks: tuple[Chunk, ...]


def urgency(*, priority: int, arrived_s: float, priority_weight_s: float) -> float:
    """The key that requests are ordered by, smaller first: each level of priority counts like arriving that much later.

    A weaker priority is therefore overtaken only by what arrives within a bounded time, so it cannot starve.
    """
    return arrived_s + priority * priority_weight_s


def decide(view: PrefillView, limits: PrefillLimits) -> PrefillPlan:
    """Admit in order while blocks and places last, then share the step's tokens among all that compute. Pure."""
    admitted = _choose_admitted(view, limits)
    demands = (*view.computing, *(_demand_of(request) for request in admitted))
    chunks = plan_chunks(demands, budget_tokens=limits.max_step_tokens, block_size_tokens=limits.block_size_tokens)
    return PrefillPlan(admit=tuple(request.sequence_id for request in admitted), chunks=chunks)


def _choose_admitted(view: PrefillView, limits: PrefillLimits) -> Sequence[WaitingPrefill]:
    places = limits.max_computing - len(view.computing)
    left_blocks = view.num_available_blocks
    admitted: list[WaitingPrefill] = []
    for request in view.waiting[: max(places, 0)]:
        left_blocks = tuple(map(sub, left_blocks, request.num_new_blocks))
        if min(left_blocks) < 0:
            break
        admitted.append(request)
    return admitted


def _demand_of(request: WaitingPrefill) -> PrefillDemand:
    return PrefillDemand(sequence_id=request.sequence_id, num_computed_tokens=request.num_cached_tokens, num_tokens=request.num_tokens)
