"""What a decode worker does in its next step: which rows it decodes, who grows or is preempted, which prompts it fills itself.

Knows: the order by age, the rule of preemption, and the budget of a step.
Does not know: where blocks or tokens live, what time it is, or how a step is run (`engine.py`).

Rows come first, oldest first. A row whose blocks are full takes one more, from its credit or from what is promised to nobody;
when neither is left the youngest running sequence gives up its own, and never one that is older than the row in need. So the
oldest always moves on, and since each request alone fits the pool (`receiver.py` refuses others), all of them end. What is
preempted comes back oldest first, and only into room that the running ones will not need at once.
"""

from dataclasses import dataclass

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
    credit_blocks: blocks that are promised to it; may be empty while every sequence has a free slot. freed_blocks: what
    preempting it would add to `num_available_blocks`; may be empty while that covers one block for each without a free slot.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Preempt, then grow by one block each, then resume, then run `rows` (one token each) and `chunks` in one step.

    What is resumed has its chunks planned from the next turn on, when it is known how much of it was still cached.
    """

    preempt: tuple[SequenceId, ...]
    grow: tuple[SequenceId, ...]
    resume: tuple[SequenceId, ...]
    rows: tuple[SequenceId, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The part of a plan that concerns running sequences; `is_short` when somebody had to go without a block."""

    preempt: tuple[SequenceId, ...]
    grow: tuple[SequenceId, ...]
    rows: tuple[SequenceId, ...]
    left_blocks: int
    is_short: bool


def decide(view: DecodeView, limits: DecodeLimits) -> DecodePlan:
    """Plan one step. Pure; rows beyond the token budget wait, which limits that fit each other never let happen."""
    rows = _plan_rows(view, limits.max_step_tokens)
    budget_tokens = limits.max_step_tokens - len(rows.rows)
    if rows.rows:
        budget_tokens = min(budget_tokens, limits.max_chunk_tokens)
    return DecodePlan(
        preempt=rows.preempt,
        grow=rows.grow,
        resume=() if rows.is_short else _choose_resumed(view, rows.left_blocks),
        rows=rows.rows,
        chunks=plan_chunks(view.filling, budget_tokens=budget_tokens, block_size_tokens=limits.block_size_tokens),
    )


def _plan_rows(view: DecodeView, max_rows: int) -> _Rows:
    if 0 not in view.free_slots:  # the common step: nobody needs a block
        return _Rows(preempt=(), grow=(), rows=view.running[:max_rows], left_blocks=view.num_available_blocks, is_short=False)
    left_blocks = view.num_available_blocks
    kept = len(view.running)  # the youngest, from here on, are preempted
    grow: list[SequenceId] = []
    rows: list[SequenceId] = []
    is_short = False
    for index, sequence_id in enumerate(view.running):
        if index == kept:
            break
        if view.free_slots[index] == 0:
            beyond_credit = view.credit_blocks[index] == 0
            while beyond_credit and left_blocks < 1 and kept > index + 1:
                kept -= 1
                left_blocks += view.freed_blocks[kept]
            if beyond_credit and left_blocks < 1:  # the rest is being filled or drained: it keeps what it has and waits
                is_short = True
                continue
            left_blocks -= beyond_credit
            grow.append(sequence_id)
        rows.append(sequence_id)
    return _Rows(
        preempt=tuple(reversed(view.running[kept:])),
        grow=tuple(grow),
        rows=tuple(rows[:max_rows]),
        left_blocks=left_blocks,
        is_short=is_short or kept < len(view.running),
    )


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
