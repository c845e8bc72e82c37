"""What a decode worker does in its next step: which rows it decodes, who grows or is preempted, which prompts it fills itself.

Knows: the order by age, the rule of preemption, and the budget of a step.
Does not know: where blocks or tokens live, what time it is, or how a step is run (`engine.py`).

Rows come first, oldest first. A row whose blocks are full takes one more, from its credit or from what is promised to nobody;
when neither is left the youngest running sequence gives up its own, and never one that is older than the row in need. So the
oldest always moves on, and since each request alone fits the pool (`receiver.py` refuses others), all of them end. What is
preempted comes back oldest first, and only into room that the running ones will not need at once.
Rows of drafts (`speculative.py`) get what is left then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub

from decode_worker.speculative import share_draft_rows
from glm_runtime.engine.chunk_plan import Chunk, PrefillDemand, plan_chunks
from kv_transfer.identity import SequenceId


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What a step may take: `max_step_tokens` in all, of it `max_chunk_tokens` for prompts while rows decode beside them."""

    max_step_tokens: int
    max_chunk_tokens: int
    block_size_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptedSequence:
    """A sequence without blocks. To go on it fills `num_new_blocks` of them again, by computing or from the cache."""

    sequence_id: SequenceId
    num_new_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeView:
    """All that `decide` looks at, oldest first. Running sequences are given as columns, since they are many and looked at every step.

    free_slots: tokens that each running sequence can still store in the blocks it has.
    credit_blocks: blocks that are promised to it, 0 where all its rows have a free slot; may be empty where those of all sequences have.
    freed_blocks: what preempting it would add to `num_available_blocks`; may be empty while that covers one block for each without a free
    slot.
    num_drafts: rows that each would like beyond its one; empty is none for all.
    filling: prompts computed here, whose blocks are allocated already.
    num_available_blocks: blocks that can be had now and are promised to nobody.
    """

    running: tuple[SequenceId, ...]
    free_slots: tuple[int, ...]
    credit_blocks: tuple[int, ...]
    freed_blocks: tuple[int, ...]
    filling: tuple[PrefillDemand, ...]
    preempted: tuple[PreemptedSequence, ...]
    num_available_blocks: int
    num_drafts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Preempt, then grow by one block each, then resume, then run `rows` (a token and `row_drafts` each) and `chunks` in one step.

    What is resumed has its chunks planned from the next turn on, when it is known how much of it was still cached.
    """

    preempt: tuple[SequenceId, ...]
    grow: tuple[SequenceId, ...]
    resume: tuple[SequenceId, ...]
    rows: tuple[SequenceId, ...]
    row_drafts: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The part of a plan that concerns running sequences; `is_short` when somebody had to go without a block."""

    preempt: tuple[SequenceId, ...]
    grow: tuple[SequenceId, ...]
    rows: tuple[SequenceId, ...]
    drafts: tuple[int, ...]
    left_blocks: int
    is_short: bool


@dataclass(slots=True)
class _Running:
    """Running sequences while they are planned, by their place in the view. left_blocks: those that nobody was promised."""

    left_blocks: int
    rows: Sequence[int] = ()
    grown: set[int] = field(default_factory=set)
    is_short: bool = False


def decide(view: DecodeView, limits: DecodeLimits) -> DecodePlan:
    """Plan one step. Pure; rows beyond the token budget wait, which limits that fit each other never let happen."""
    rows = _plan_rows(view, limits)
    reserved_tokens = min(limits.max_chunk_tokens, limits.max_step_tokens - len(rows.rows)) if view.filling else 0
    drafts = share_draft_rows(rows.drafts, limits.max_step_tokens - len(rows.rows) - reserved_tokens) if rows.drafts else rows.drafts
    budget_tokens = limits.max_step_tokens - len(rows.rows) - sum(drafts)
    if rows.rows:
        budget_tokens = min(budget_tokens, limits.max_chunk_tokens)
    return DecodePlan(
        preempt=rows.preempt,
        grow=rows.grow,
        resume=() if rows.is_short else _choose_resumed(view, rows.left_blocks),
        rows=rows.rows,
        row_drafts=drafts or (0,) * len(rows.rows),
        chunks=plan_chunks(view.filling, budget_tokens=budget_tokens, block_size_tokens=limits.block_size_tokens),
    )


def _plan_rows(view: DecodeView, limits: DecodeLimits) -> _Rows:
    max_rows = limits.max_step_tokens
    is_roomy = min(map(sub, view.free_slots, view.num_drafts), default=1) > 0 if view.num_drafts else 0 not in view.free_slots
    if is_roomy:  # the common step: nobody needs a block
        drafts = view.num_drafts[:max_rows]
        return _Rows(
            preempt=(), grow=(), rows=view.running[:max_rows], drafts=drafts, left_blocks=view.num_available_blocks, is_short=False
        )
    running = _Running(view.num_available_blocks)
    if 0 in view.free_slots:
        kept = _move_all(view, running)
        rows = tuple([view.running[index] for index in running.rows[:max_rows]])
    else:  # only drafts want blocks
        kept = len(view.running)
        running.rows = range(kept)
        rows = view.running[:max_rows]
    drafts = _room_for_drafts(view, running, limits.block_size_tokens) if view.num_drafts else ()
    return _Rows(
        preempt=tuple(reversed(view.running[kept:])),
        grow=tuple([view.running[index] for index in sorted(running.grown)]),
        rows=rows,
        drafts=drafts[:max_rows],
        left_blocks=running.left_blocks,
        is_short=running.is_short or kept < len(view.running),
    )


def _move_all(view: DecodeView, running: _Running) -> int:
    """Find each sequence the room for one row, oldest first. Returns how many are kept; the youngest, from there on, are preempted."""
    kept = len(view.running)
    rows: list[int] = []
    for index, free_slots in enumerate(view.free_slots):
        if index == kept:
            break
        if free_slots == 0:
            beyond_credit = view.credit_blocks[index] == 0
            while beyond_credit and running.left_blocks < 1 and kept > index + 1:
                kept -= 1
                running.left_blocks += view.freed_blocks[kept]
            if beyond_credit and running.left_blocks < 1:  # the rest is being filled or drained: it keeps what it has and waits
                running.is_short = True
                continue
            running.left_blocks -= beyond_credit
            running.grown.add(index)
        rows.append(index)
    running.rows = rows
    return kept


def _room_for_drafts(view: DecodeView, running: _Running, block_size_tokens: int) -> tuple[int, ...]:
    """Drafts of each planned row that find room: in its blocks, in one more of its credit, or in one that nobody needs now."""
    drafts = []
    for index in running.rows:
        free_slots, wanted = view.free_slots[index], view.num_drafts[index]
        if free_slots > wanted:  # most of them
            drafts.append(wanted)
            continue
        free_slots += block_size_tokens * (index in running.grown)
        if free_slots <= wanted and index not in running.grown:
            beyond_credit = view.credit_blocks[index] == 0
            if not beyond_credit or (running.left_blocks > 0 and not running.is_short):
                running.left_blocks -= beyond_credit
                running.grown.add(index)
                free_slots += block_size_tokens
        drafts.append(min(wanted, free_slots - 1))
    return tuple(drafts)


def _choose_resumed(view: DecodeView, left_blocks: int) -> tuple[SequenceId, ...]:
    """The oldest preempted ones that leave a block for each sequence that runs or fills; alone, one needs to leave none."""
    num_others = len(view.running) + len(view.filling)
    resumed: list[SequenceId] = []
    for sequence in view.preempted:
        if sequence.num_new_blocks + num_others > left_blocks:
            break
        left_blocks -= sequence.num_new_blocks
        num_others += 1
        resumed.append(sequence.sequence_id)
    return tuple(resumed)
