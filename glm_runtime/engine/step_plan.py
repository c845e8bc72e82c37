"""What one step computes, and what comes out. Values only; who decides it are the schedulers, who executes it is the runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters


class SequenceSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that one sequence contributes to a step: a prefill chunk, or one decode row.

    tokens: the token ids of this step, at least one; row i has position `start + i`. Everything below `start` must already be in
    the cache. block_table: the blocks of positions 0, 64, 128 ... up to the last row of this step, at least; more are ignored.
    sampling: how to draw the token after the last row, or None to draw nothing (a chunk that is not the prompt's last).
    token_index: which output token of the request that is, counted from 0 over all attempts; it keys the noise.
    A struct, since one is made for each row of each step: making a frozen dataclass costs four times as much.
    """

    sequence_id: SequenceId
    tokens: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    sampling: SamplingParameters | None = None
    token_index: int = 0

    @property
    def end(self) -> int:
        """Positions [start, end) are computed by this step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One forward over any mix of prefill chunks and decode rows. A sequence occurs at most once."""

    step_number: int
    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(len(piece.tokens) for piece in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The tokens drawn by one step, for the slices that asked for one."""

    step_number: int
    samples: Mapping[SequenceId, int]
