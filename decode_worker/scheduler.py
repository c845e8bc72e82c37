"""What a decode worker does in its next step: which rows it decodes, who grows or is preempted, which prompts it fills itself.

Knows: the order by age, the rule of preemption, and the budget of a step.
Does not know: where blocks or tokens live, what time it is, or how a step is run (`engine.py`).

Rows come first, oldest first. A row whose blocks are full takes one more, from its credit or from what is promised to nobody;
when neither is left the youngest running sequence gives up its own, and never one that is older than the row in need. So the
oldest always moves on, and since each request alone fits the pool (`receiver.py` refuses others), all of them end. What is
preempted comes back oldest first, and only into room that the running ones will not need at once.
Where ranks share a sequence's cache, blocks are counted by home (`BlockPool`): a free block of another home helps nobody.
Rows of drafts (`speculative.py`) get what is left then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add, sub

import msgspec

from decode_worker.speculative import share_draft_rows
from glm_runtime.engine.chunk_plan import Chunk, PrefillDemand, plan_chunks
from kv_transfer.identity import SequenceId


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What a step may take: `max_step_tokens` in all, of it `max_chunk_tokens` for prompts while rows decode beside them.

    ahead_tokens: while blocks are plenty, who grows in the same step as others because it has fewer free slots than that; 0 is nobody.
    """

    max_step_tokens: int
    max_chunk_tokens: int
    block_size_tokens: int
    ahead_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptedSequence:
    """A sequence without blocks. To go on it fills `num_new_blocks` of them, by home, again, by computing or from the cache."""

    sequence_id: SequenceId
    num_new_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeView:
    """All that `decide` looks at, oldest first. Running sequences are given as columns, since they are many and looked at every step.

    free_slots: tokens that each running sequence can still store in the blocks it has; may be empty where `credit_blocks` is.
    credit_blocks: blocks that are promised to it, 0 where all its rows have a free slot; empty where those of all sequences have, which
    spares `decide` the search.
    freed_blocks: what preempting it would add to `num_available_blocks`; may be empty while that covers one block of any home for each
    without a free slot.
    num_drafts: rows that each would like beyond its one; empty is none for all.
    filling: prompts computed here, whose blocks are allocated already.
    num_available_blocks: blocks of each home that can be had now and are promised to nobody.
    next_homes: the home of the next block of each running sequence; empty where there is one home.
    """

    running: tuple[SequenceId, ...]
    free_slots: tuple[int, ...]
    credit_blocks: tuple[int, ...]
    freed_blocks: tuple[tuple[int, ...], ...]
    filling: tuple[PrefillDemand, ...]
    preempted: tuple[PreemptedSequence, ...]
    num_available_blocks: tuple[int, ...]
    num_drafts: tuple[int, ...] = ()
    next_homes: tuple[int, ...] = ()

    def next_home(self, index: int) -> int:
        """The home of the next block of one running sequence."""
        return self.next_homes[index] if self.next_homes else 0


class DecodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Preempt, then grow by one block each, then resume, then run `rows` (a token and `row_drafts` each) and `chunks` in one step.

    What is resumed has its chunks planned from the next turn on, when it is known how much of it was still cached.
    """

    preempt: tuple[SequenceId, ...]
    grow: tuple[SequenceId, ...]
    resume: tuple[SequenceId, ...]
    rows: tuple[SequenceId, ...]
    row_drafts: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class _Rows:
    """Running sequences while they are planned, by their place in the view.

    left_blocks: by home, those that nobody was promised. num_kept: the youngest, from there on, are preempted. waiting: places that run
    no row, for want of a block. drafts: of each place.
    """

    left_blocks: list[int]
    num_kept: int
    drafts: Sequence[int]
    grown: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


def decide(view: DecodeView, limits: DecodeLimits) -> DecodePlan:
    """Plan one step. Pure; rows beyond the token budget wait, which limits that fit each other never let happen."""
    planned = _plan_rows(view, limits)
    rows, drafts = _columns(view, planned, limits.max_step_tokens)
    left_tokens = limits.max_step_tokens - len(rows)
    if drafts:
        reserved_tokens = min(limits.max_chunk_tokens, left_tokens) if view.filling else 0
        drafts = share_draft_rows(drafts, left_tokens - reserved_tokens)
    budget_tokens = left_tokens - sum(drafts)
    if rows:
        budget_tokens = min(budget_tokens, limits.max_chunk_tokens)
    running = view.running
    is_short = planned.waiting or planned.num_kept < len(running)
    return DecodePlan(
        preempt=running[planned.num_kept :][::-1],
        grow=tuple([running[index] for index in sorted(planned.grown)]),
        resume=() if is_short or not view.preempted else _choose_resumed(view, planned.left_blocks),
        rows=rows,
        row_drafts=drafts or (0,) * len(rows),
        chunks=plan_chunks(view.filling, budget_tokens=budget_tokens, block_size_tokens=limits.block_size_tokens),
    )


def _columns(view: DecodeView, planned: _Rows, max_rows: int) -> tuple[tuple[SequenceId, ...], tuple[int, ...]]:
    """Ids and drafts of the rows that run; no drafts at all where nobody wants any."""
    rows, drafts = view.running, tuple(planned.drafts)
    if planned.num_kept < len(rows) or planned.waiting:
        places = [index for index in range(planned.num_kept) if index not in planned.waiting]
        rows, drafts = tuple([rows[index] for index in places]), tuple([drafts[index] for index in places]) if drafts else ()
    return rows[:max_rows], drafts[:max_rows]


def _plan_rows(view: DecodeView, limits: DecodeLimits) -> _Rows:
    rows = _Rows(list(view.num_available_blocks), len(view.running), view.num_drafts)
    if not view.credit_blocks:  # nobody needs a block
        return rows
    if 0 in view.free_slots:
        _move_all(view, rows)
    if view.num_drafts:
        rows.drafts = _room_for_drafts(view, rows, limits.block_size_tokens)
    _grow_ahead(view, rows, limits.ahead_tokens)
    return rows


def _grow_ahead(view: DecodeView, rows: _Rows, ahead_tokens: int) -> None:
    """Let those grow now that would soon, so that most steps look for no blocks; as long as everybody could still have one more and
    nobody waits for blocks.
    """
    if not ahead_tokens or view.preempted or rows.num_kept < len(view.running):
        return
    for index in [index for index, free_slots in enumerate(view.free_slots) if free_slots < ahead_tokens]:
        home = view.next_home(index)
        if rows.left_blocks[home] <= len(view.running):
            return
        if index not in rows.grown:
            rows.left_blocks[home] -= 1
            rows.grown.add(index)


def _move_all(view: DecodeView, rows: _Rows) -> None:
    """Find each sequence the room for one row, oldest first."""
    for index in [index for index, free_slots in enumerate(view.free_slots) if free_slots == 0]:
        if index >= rows.num_kept:
            break
        beyond_credit = view.credit_blocks[index] == 0
        home = view.next_home(index)
        while beyond_credit and rows.left_blocks[home] < 1 and rows.num_kept > index + 1:
            rows.num_kept -= 1
            rows.left_blocks = list(map(add, rows.left_blocks, view.freed_blocks[rows.num_kept]))
        if beyond_credit and rows.left_blocks[home] < 1:  # the rest is being filled or drained: it keeps what it has and waits
            rows.waiting.add(index)
            continue
        rows.left_blocks[home] -= beyond_credit
        rows.grown.add(index)


def _room_for_drafts(view: DecodeView, rows: _Rows, block_size_tokens: int) -> list[int]:
    """Drafts of each place that find room: in its blocks, in one more of its credit, or in one that nobody needs now."""
    drafts = list(view.num_drafts)
    may_take = not rows.waiting
    for index in [index for index, spare in enumerate(map(sub, view.free_slots, drafts)) if spare <= 0]:
        if index >= rows.num_kept:
            break
        if index in rows.waiting:
            continue
        free_slots = view.free_slots[index]
        if index in rows.grown:
            free_slots += block_size_tokens
        else:
            beyond_credit = view.credit_blocks[index] == 0
            home = view.next_home(index)
            if not beyond_credit or (rows.left_blocks[home] > 0 and may_take):
                rows.left_blocks[home] -= beyond_credit
                rows.grown.add(index)
                free_slots += block_size_tokens
        drafts[index] = min(drafts[index], free_slots - 1)
    return drafts


def _choose_resumed(view: DecodeView, left_blocks: Sequence[int]) -> tuple[SequenceId, ...]:
    """The oldest preempted ones that leave a block, of any home, for each sequence that runs or fills; alone, one needs to leave none."""
    num_others = len(view.running) + len(view.filling)
    resumed: list[SequenceId] = []
    for sequence in view.preempted:
        left_blocks = list(map(sub, left_blocks, sequence.num_new_blocks))
        if min(left_blocks) < num_others:
            break
        num_others += 1
        resumed.append(sequence.sequence_id)
    return tuple(resumed)
