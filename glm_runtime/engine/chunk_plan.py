"""How one step's token budget is shared among the prompts that still compute.

Knows: chunks end at whole blocks except a prompt's last, and who gets how much. Both workers prefill with it.
Does not know: how requests are ordered, admitted or given blocks (the schedulers), or what a step costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.identity import SequenceId


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillDemand:
    """Tokens [num_computed_tokens, num_tokens) of one sequence still have to be computed."""

    sequence_id: SequenceId
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Compute tokens [start, end) of one sequence in this step; `is_last` when nothing of its prompt remains after it."""

    sequence_id: SequenceId
    start: int
    end: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that this chunk takes of the step's budget."""
        return self.end - self.start


def plan_chunks(demands: Sequence[PrefillDemand], *, budget_tokens: int, block_size_tokens: int) -> tuple[Chunk, ...]:
    """Share `budget_tokens` among the demands, which come in order of urgency; at most one chunk each, in that same order.

    Half of the budget belongs to the first demand, so it always moves and nobody behind it can starve it; the other half goes
    to whoever has least left to do, so short prompts do not wait behind a long one. What either half leaves over goes to the
    other, so either every demand is met or less than one block's worth of the budget is left. A chunk that is not a
    prompt's last ends at a multiple of `block_size_tokens`; a demand whose share does not reach the next such edge gets none.

    When the budget is at least one block, the first demand always gets a chunk.
    """
    if not demands or budget_tokens <= 0:
        return ()
    first = demands[0]
    share_tokens = min(budget_tokens, max(block_size_tokens, budget_tokens // 2))
    ends = {first.sequence_id: _reachable_end(first, first.num_computed_tokens, share_tokens, block_size_tokens)}
    left_tokens = budget_tokens - (ends[first.sequence_id] - first.num_computed_tokens)
    by_remaining = sorted(demands[1:], key=lambda demand: demand.num_tokens - demand.num_computed_tokens)
    for demand in (*by_remaining, first):
        if left_tokens <= 0:
            break
        reached = ends.get(demand.sequence_id, demand.num_computed_tokens)
        end = _reachable_end(demand, reached, left_tokens, block_size_tokens)
        ends[demand.sequence_id] = end
        left_tokens -= end - reached
    return tuple(_chunks(demands, ends))


def _reachable_end(demand: PrefillDemand, start: int, share_tokens: int, block_size_tokens: int) -> int:
    """The furthest legal chunk end within `share_tokens` of `start`; `start` itself when no legal end lies within."""
    limit = start + share_tokens
    if limit >= demand.num_tokens:
        return demand.num_tokens
    return max(start, limit - limit % block_size_tokens)


def _chunks(demands: Sequence[PrefillDemand], ends: dict[SequenceId, int]) -> list[Chunk]:
    return [
        Chunk(sequence_id=demand.sequence_id, start=demand.num_computed_tokens, end=end, is_last=end == demand.num_tokens)
        for demand in demands
        if (end := ends.get(demand.sequence_id, demand.num_computed_tokens)) > demand.num_computed_tokens
    ]
