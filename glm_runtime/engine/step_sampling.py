"""From the hidden states of a step to what its slices asked for: tokens drawn, drafts verified, prompts scored.

Knows: which rows of a plan draw a token, and what each of them sees. Does not know how a token is drawn (`glm_runtime.sampling`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.engine.verification import accepted_run
from glm_runtime.ops.vocab_argmax import Best
from glm_runtime.runtime_config import VerificationChoice
from glm_runtime.sampling.logprobs import token_logprobs
from glm_runtime.sampling.parameters import is_greedy
from glm_runtime.sampling.ratio_test import DraftedRun, Probabilities, verify_runs
from glm_runtime.sampling.rows import Sample, SampleRow
from glm_runtime.sampling.sampler import sample_rows
from kv_transfer.identity import SequenceId
from kv_transfer.messages import TokenLogprobs

LogitsOf = Callable[[Tensor], tuple[Tensor, Best]]
"""fp32 logits [M, V] of rows of hidden states, and the best of each row."""

Proposals = Mapping[SequenceId, Sequence[Probabilities]]

PROMPT_ROWS_AT_ONCE = 64
"""Prompt rows whose logits are in memory together: 40 MB at a vocabulary of 154,880."""


def draw(
    plan: StepPlan, hidden: Tensor, logits_of: LogitsOf, verification: VerificationChoice = "exact", proposals: Proposals | None = None
) -> dict[SequenceId, tuple[Sample, ...]]:
    """What stands, by sequence: the drafts that held and one token more.

    hidden: [rows, hidden] of all the plan's rows. proposals: what drafts were drawn from, by sequence, where `verification` is "ratio".
    """
    places: list[int] = []
    rows: list[SampleRow] = []
    asking = []
    end = 0
    for piece in plan.slices:
        end += len(piece.tokens)
        if piece.sampling is not None:
            places += range(end - piece.num_drafts - 1, end)
            rows += _rows(piece)
            asking.append(piece)
    if not rows:
        return {}
    logits, best = logits_of(hidden if len(rows) == len(hidden) else hidden.index_select(0, torch.tensor(places)))
    if verification == "exact":
        return _drawn(asking, sample_rows(logits, rows, best))
    return _draw_by_ratio(asking, rows, logits, proposals or {})


def _draw_by_ratio(
    asking: Sequence[SequenceSlice], rows: Sequence[SampleRow], logits: Tensor, proposals: Proposals
) -> dict[SequenceId, tuple[Sample, ...]]:
    """Of drafts that are tested by their ratio, and of the others: greedy slices, and those without drafts."""
    is_tested = [piece.num_drafts > 0 and not is_greedy(rows[0].parameters) for piece, rows in _with_rows(asking, rows)]
    parts = []
    for tested in (False, True):
        own = [tested is each for each, piece in zip(is_tested, asking, strict=True) for _ in range(piece.num_drafts + 1)]
        pieces = [piece for each, piece in zip(is_tested, asking, strict=True) if each is tested]
        parts.append((pieces, [row for row, is_own in zip(rows, own, strict=True) if is_own], logits[torch.tensor(own)]))
    (plain, plain_rows, plain_logits), (tested_pieces, tested_rows, tested_logits) = parts
    drawn = _drawn(plain, sample_rows(plain_logits, plain_rows)) if plain else {}
    runs = [_drafted(piece, rows, proposals) for piece, rows in _with_rows(tested_pieces, tested_rows)]
    return drawn | dict(zip([piece.sequence_id for piece in tested_pieces], verify_runs(tested_logits, runs), strict=True))


def _drawn(asking: Sequence[SequenceSlice], samples: Sequence[Sample]) -> dict[SequenceId, tuple[Sample, ...]]:
    """The samples up to and with the first that its draft did not foretell."""
    drawn = {}
    first = 0
    for piece in asking:
        own = samples[first : first + piece.num_drafts + 1]
        first += len(own)
        run = accepted_run([one.token for one in own], piece.tokens[piece.num_given :]) if piece.num_drafts else own
        drawn[piece.sequence_id] = tuple(own[: len(run)])
    return drawn


def _with_rows(pieces: Sequence[SequenceSlice], rows: Sequence[SampleRow]) -> Iterator[tuple[SequenceSlice, Sequence[SampleRow]]]:
    first = 0
    for piece in pieces:
        yield piece, rows[first : first + piece.num_drafts + 1]
        first += piece.num_drafts + 1


def _drafted(piece: SequenceSlice, rows: Sequence[SampleRow], proposals: Proposals) -> DraftedRun:
    """Drafts of which nobody knows (any more) what they were drawn from are verified as best guesses: that is exact for any guess."""
    proposed = proposals.get(piece.sequence_id)
    drafts = piece.tokens[piece.num_given :]
    return DraftedRun(rows=rows, drafts=drafts, proposed=proposed[: len(drafts)] if proposed is not None else None)


def _rows(piece: SequenceSlice) -> Iterator[SampleRow]:
    assert piece.sampling is not None, "the slice draws nothing"
    masks = piece.grammar.masks(piece.tokens[piece.num_given :]) if piece.grammar is not None else None
    for number in range(piece.num_drafts + 1):
        yield SampleRow(
            parameters=piece.sampling,
            token_index=piece.token_index + number,
            history=piece.history,
            drafts=piece.tokens[piece.num_given : piece.num_given + number] if number else (),
            mask=masks[number] if masks is not None else None,
        )


def score_prompts(plan: StepPlan, hidden: Tensor, logits_of: LogitsOf) -> Mapping[SequenceId, tuple[TokenLogprobs, ...]]:
    """Log-probabilities of `SequenceSlice.following`, by sequence; always of the model's own distribution."""
    scored = {}
    start = 0
    for piece in plan.slices:
        if piece.following:
            scored[piece.sequence_id] = tuple(_score(hidden[start:], piece.following, piece.num_prompt_logprobs, logits_of))
        start += len(piece.tokens)
    return scored


def _score(hidden: Tensor, following: Sequence[int], num_top: int, logits_of: LogitsOf) -> Iterator[TokenLogprobs]:
    for first in range(0, len(following), PROMPT_ROWS_AT_ONCE):
        tokens = following[first : first + PROMPT_ROWS_AT_ONCE]
        logits = logits_of(hidden[first : first + len(tokens)])[0].cpu().numpy().astype(np.float64)
        for token, row in zip(tokens, logits, strict=True):
            yield token_logprobs(row, token, num_top)
