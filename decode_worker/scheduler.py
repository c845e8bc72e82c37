"""What a decode worker does in its next step: which rows it decodes, who grows or is preempted, which prompts it fills itself.

Knows: the order by age, the rule of preemption, and the budget of a step.
Does not know: where blocks or tokens live, what time it is, or how a step is run (`engine.py`).

Rows come first, oldest first. A row whose blocks are full takes one more; when none is left the youngest running sequence
gives up its own, and never one that is older than the row in need. So the oldest always moves on, and since each request alone
fits the pool (`receiver.py` refuses others), all of them end. What is preempted comes back oldest first, and only into room that
the running ones will not need at once.
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
    """A sequence without blocks. To go on it computes tokens [num_cached_tokens, num_tokens) again; `num_new_blocks` is what its
    whole block table takes of the blocks that are available.
    """

    sequence_id: SequenceId
    num_cached_tokens: int
    num_tokens: int
    num_new_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeView:
    """All that `decide` looks at, oldest first. Running sequences are given as columns, since they are many and looked at every step.

    free_slots: tokens that each running sequence can still store in the blocks it has.
    exclusive_blocks: blocks that preempting it would make available; may be empty while `num_available_blocks` covers one
    block for each full sequence.
    filling: prompts computed here, whose blocks are allocated already.
    """

    running: tuple[SequenceId, ...]
    free_slots: tuple[int, ...]
    exclusive_blocks: tuple[int, ...]
    filling: tuple[PrefillDemand, ...]
    preempted: tuple[PreemptedSequence, ...]
    num_available_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Preempt, then grow by one block each, then resume, then run `rows` (one token each) and `chunks` in one step."""

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
    resumed = () if rows.is_short else _choose_resumed(view, rows)
    budget_tokens = limits.max_step_tokens - len(rows.rows)
    if rows.rows:
        budget_tokens = min(budget_tokens, limits.max_chunk_tokens)
    demands = (*view.filling, *(_demand_of(sequence) for sequence in resumed))
    chunks = plan_chunks(demands, budget_tokens=budget_tokens, block_size_tokens=limits.block_size_tokens)
    return DecodePlan(
        preempt=rows.preempt,
        grow=rows.grow,
        resume=tuple(sequence.sequence_id for sequence in resumed),
        rows=rows.rows,
        chunks=chunks,
    )


def _plan_rows(view: DecodeView, max_rows: int) -> _Rows:
    if 0 not in view.free_slots:  # the common step: nobody needs a block
        return _Rows(preempt=(), grow=(), rows=view.running[:max_rows], left_blocks=view.num_available_blocks, is_short=False)
    left_blocks = view.num_available_blocks
    youngest = len(view.running) - 1
    grow: list[SequenceId] = []
    rows: list[SequenceId] = []
    is_short = False
    index = 0
    while index <= youngest:
        if view.free_slots[index] == 0:
            while left_blocks < 1 and youngest > index:
                left_blocks += view.exclusive_blocks[youngest]
                youngest -= 1
            if left_blocks < 1:  # all else is being filled or drained: it keeps what it has and waits
                is_short = True
                index += 1
                continue
            left_blocks -= 1
            grow.append(view.running[index])
        rows.append(view.running[index])
        index += 1
    preempt = view.running[:youngest:-1]  # youngest first
    return _Rows(
        preempt=preempt, grow=tuple(grow), rows=tuple(rows[:max_rows]), left_blocks=left_blocks, is_short=is_short or bool(preempt)
    )


def _choose_resumed(view: DecodeView, rows: _Rows) -> tuple[PreemptedSequence, ...]:
    """The oldest preempted ones that leave a block for each sequence that runs or fills; alone, one needs to leave none."""
    num_others = len(view.running) + len(view.filling)
    left_blocks = rows.left_blocks
    resumed: list[PreemptedSequence] = []
    for sequence in view.preempted:
        if sequence.num_new_blocks + num_others > left_blocks:
            break
        left_blocks -= sequence.num_new_blocks
        num_others += 1
        resumed.append(sequence)
    return tuple(resumed)


def _demand_of(sequence: PreemptedSequence) -> PrefillDemand:
    return PrefillDemand(sequence_id=sequence.sequence_id, num_computed_tokens=sequence.num_cached_tokens, num_tokens=sequence.num_tokens)
