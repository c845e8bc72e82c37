"""A step plan as bytes, for the ranks that did not decide it: of a block table and of parameters, only what has changed.

Knows: what the other ranks must be told, and what both ends remember of the last plan. Does not know how bytes travel
(`rank_group.py`). Encoder and decoder are mirrors: each frame of one encoder goes to each of its decoders once, in order.
"""

from collections.abc import Sequence

import msgspec

from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A `SequenceSlice` without history and grammar. The block table is the first `num_kept` blocks of the last plan's, then `blocks`.

    sampling: where it is not what the last plan said; `draws`: whether the slice has any.
    """

    sequence_id: SequenceId
    tokens: tuple[int, ...]
    start: int
    num_kept: int
    blocks: list[BlockId]
    draws: bool
    sampling: SamplingParameters | None
    token_index: int
    following: tuple[int, ...]
    num_prompt_logprobs: int
    num_drafts: int
    next_token: int | None
    num_next_drafts: int
    seed_hidden: bytes | None
    num_seed_drafts: int
    keeps_hidden: bool


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    """A `StepPlan`. stop_rule: its two prices."""

    step_number: int
    pieces: tuple[_Piece, ...]
    stop_rule: tuple[float, float] | None
    copies: tuple[BlockCopy, ...]


class _Known(msgspec.Struct):
    """What both ends remember of a sequence of the last plan. The table is replaced and never written: plans hold it."""

    table: list[BlockId]
    sampling: SamplingParameters | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Plan)


class PlanEncoder:
    """The deciding rank's end."""

    def __init__(self) -> None:
        self._known: dict[SequenceId, _Known] = {}

    def encode(self, plan: StepPlan) -> bytes:
        """The next frame. Sequences that are not in the plan are forgotten."""
        before, self._known = self._known, {}
        pieces = tuple([self._piece(piece, before.get(piece.sequence_id)) for piece in plan.slices])
        rule = plan.stop_rule
        return _ENCODER.encode(_Plan(plan.step_number, pieces, None if rule is None else (rule.row, rule.step), plan.copies))

    def _piece(self, piece: SequenceSlice, known: _Known | None) -> _Piece:
        if known is None:
            known = _Known([], None)
        self._known[piece.sequence_id] = known
        num_kept, blocks = _change(known.table, piece.block_table)
        if blocks or num_kept < len(known.table):
            known.table = known.table[:num_kept] + blocks
        sampling = None
        if piece.sampling is not None and piece.sampling is not known.sampling and piece.sampling != known.sampling:
            known.sampling = piece.sampling
            sampling = without_text(piece.sampling)
        return _Piece(
            piece.sequence_id,
            tuple(piece.tokens),
            piece.start,
            num_kept,
            blocks,
            piece.sampling is not None,
            sampling,
            piece.token_index,
            tuple(piece.following),
            piece.num_prompt_logprobs,
            piece.num_drafts,
            piece.next_token,
            piece.num_next_drafts,
            piece.seed_hidden,
            piece.num_seed_drafts,
            piece.keeps_hidden,
        )


class PlanDecoder:
    """The end of a rank that is told."""

    def __init__(self) -> None:
        self._known: dict[SequenceId, _Known] = {}

    def decode(self, frame: bytes) -> StepPlan:
        """The plan, without histories, grammars' states and their texts: who reads them draws the tokens.

        Raises msgspec.DecodeError for what is no plan.
        """
        plan = _DECODER.decode(frame)
        before, self._known = self._known, {}
        slices = tuple([self._slice(piece, before.get(piece.sequence_id)) for piece in plan.pieces])
        return StepPlan(step_number=plan.step_number, slices=slices, stop_rule=_stop_rule(plan.stop_rule), copies=plan.copies)

    def _slice(self, piece: _Piece, known: _Known | None) -> SequenceSlice:
        if known is None:
            known = _Known([], None)
        self._known[piece.sequence_id] = known
        if piece.blocks or piece.num_kept < len(known.table):
            known.table = known.table[: piece.num_kept] + piece.blocks
        if piece.sampling is not None:
            known.sampling = piece.sampling
        return SequenceSlice(
            sequence_id=piece.sequence_id,
            tokens=piece.tokens,
            start=piece.start,
            block_table=known.table,
            sampling=known.sampling if piece.draws else None,
            token_index=piece.token_index,
            following=piece.following,
            num_prompt_logprobs=piece.num_prompt_logprobs,
            num_drafts=piece.num_drafts,
            next_token=piece.next_token,
            num_next_drafts=piece.num_next_drafts,
            seed_hidden=piece.seed_hidden,
            num_seed_drafts=piece.num_seed_drafts,
            keeps_hidden=piece.keeps_hidden,
        )


def without_text(sampling: SamplingParameters) -> SamplingParameters:
    """The parameters as other ranks know them: that there is a grammar, which decides what ranks exchange, but not which."""
    if sampling.grammar is None:
        return sampling
    return msgspec.structs.replace(sampling, grammar=msgspec.structs.replace(sampling.grammar, text=""))


def _stop_rule(prices: tuple[float, float] | None) -> StopRule | None:
    return None if prices is None else StopRule(row=prices[0], step=prices[1])


def _change(known: list[BlockId], given: Sequence[BlockId]) -> tuple[int, list[BlockId]]:
    """How many first blocks of `known` the given table keeps, and what follows them."""
    if given == known:
        return len(known), []
    table = list(given)  # the deciding thread may append to it meanwhile
    count = min(len(known), len(table))
    if table[:count] != known[:count]:
        count = next(place for place, (old, new) in enumerate(zip(known, table, strict=False)) if old != new)
    return count, table[count:]
