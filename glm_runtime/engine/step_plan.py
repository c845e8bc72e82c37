"""What one step computes, and what comes out. Values only; who decides it are the schedulers, who executes it is the runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.sampling.grammar import GrammarState
from glm_runtime.sampling.history import TokenHistory
from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters, TokenLogprobs


class SequenceSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that one sequence contributes to a step: a prefill chunk, or one decode row and its drafts.

    tokens: the token ids of this step, at least one; row i has position `start + i`. Everything below `start` must already be in
    the cache. block_table: the blocks of positions 0, 64, 128 ... up to the last row of this step, at least; more are ignored.
    sampling: how to draw the token after the last row, or None to draw nothing (a chunk that is not the prompt's last).
    token_index: which output token of the request that is, counted from 0 over all attempts; it keys the noise.
    history: the tokens of the sequence as penalties and bad words see them, without drafts, where the parameters read it.
    grammar: where the sequence's output is in its grammar, without drafts, where the parameters have one; read while the step runs.
    following: the prompt tokens after the first rows, one each, whose log-probabilities are asked for with `num_prompt_logprobs` of the
    largest. A struct, since one is made for each row of each step: making a frozen dataclass costs four times as much.

    With an MTP layer also:
    num_drafts: the last that many of `tokens` are guesses. The row before each draws a token, from `token_index` on; a guess that is
    not what was drawn ends the run, and what its row and later ones store is worth nothing.
    next_token: the token after the last row where none is drawn; the MTP layer's keys of that row are made from it.
    num_next_drafts: how many drafts to make for the sequence's next step, after the tokens that this one draws.
    seed_hidden: the hidden state of position `start - 1`, which another worker computed. `num_seed_drafts` drafts are made from it and
    verified in this same step; the block table must have room for their rows.
    keeps_hidden: return the hidden state of the last row, for another worker to draft from.
    """

    sequence_id: SequenceId
    tokens: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    sampling: SamplingParameters | None = None
    token_index: int = 0
    history: TokenHistory | None = None
    grammar: GrammarState | None = None
    following: Sequence[int] = ()
    num_prompt_logprobs: int = 0
    num_drafts: int = 0
    next_token: int | None = None
    num_next_drafts: int = 0
    seed_hidden: bytes | None = None
    num_seed_drafts: int = 0
    keeps_hidden: bool = False

    @property
    def end(self) -> int:
        """Positions [start, end) are computed by this step."""
        return self.start + len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Rows that the step has for this sequence, those of drafts that are made in the step included."""
        return len(self.tokens) + self.num_seed_drafts

    @property
    def num_given(self) -> int:
        """Tokens that are no guesses."""
        return len(self.tokens) - self.num_drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One forward over any mix of prefill chunks and decode rows. A sequence occurs at most once.

    Without slices it is the step of a worker that has nothing to compute while others of its replica may have.
    stop_rule: when fewer drafts than `num_next_drafts` are made; None is never. copies: blocks that the ranks of the worker copy among
    themselves before anything else (`parallel/block_exchange.py`); a step may do no more than that.
    """

    step_number: int
    slices: tuple[SequenceSlice, ...]
    stop_rule: StopRule | None = None
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum([piece.num_rows for piece in self.slices])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step drew, for the slices that asked for it.

    samples: one token or more for each: the drafts that held, then the first token that no draft foretold. logprobs: of those, where the
    parameters ask for them. prompt_logprobs: of each slice's `following`. drafts: guesses at what follows the samples. hidden_states:
    raw bytes in the runtime's dtype. num_draft_steps: draft steps that were made for the next step, 0 where nobody wanted drafts.
    target_s, draft_s: how long the target and the MTP layer took. is_idle: no worker of the replica had rows, so that nothing was computed
    and nobody will be there for another step until all are called again.
    """

    step_number: int
    samples: Mapping[SequenceId, tuple[int, ...]]
    logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    drafts: Mapping[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    hidden_states: Mapping[SequenceId, bytes] = field(default_factory=dict)
    num_draft_steps: int = 0
    target_s: float = 0.0
    draft_s: float = 0.0
    is_idle: bool = False
