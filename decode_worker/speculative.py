"""How many drafts each row of a step verifies. Pure.

Knows: what limits them - the request's end, the step's rows, the blocks at hand. Does not know what a draft is worth
(`glm_runtime.engine.draft_budget`) or how it is verified (the runner). Drafts are luxury: they never preempt anybody, never take the
block that an older row needs to move at all, and leave prompts their part of the step.

A draft that does not hold needs no undoing: what its row has stored lies beyond the sequence's length and is stored over.
"""

from collections.abc import Sequence


def choose_num_drafts(*, num_available: int, num_wanted: int, num_left_tokens: int) -> int:
    """Drafts that a sequence verifies in its next step, blocks and budget aside.

    num_available: how many were made. num_left_tokens: output tokens that the request may still have; the last of them is drawn by the
    row of the one before it, so more rows than that would be computed for nothing.
    """
    if num_wanted < num_left_tokens:  # nearly always; asked for each row of each step
        return num_available if num_available < num_wanted else num_wanted
    return max(min(num_available, num_left_tokens - 1), 0)


def share_draft_rows(num_drafts: Sequence[int], budget_rows: int) -> tuple[int, ...]:
    """What each row, oldest first, gets of the rows that a step has left for drafts."""
    if sum(num_drafts) <= budget_rows:
        return tuple(num_drafts)
    shared = []
    for wanted in num_drafts:
        granted = min(wanted, max(budget_rows, 0))
        budget_rows -= granted
        shared.append(granted)
    return tuple(shared)
