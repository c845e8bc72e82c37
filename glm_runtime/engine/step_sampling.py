"""From the hidden states of a step to what its slices asked for: tokens drawn, drafts verified, prompts scored.

Knows: which rows of a plan draw a token, and what each of them sees. Does not know how a token is drawn (`glm_runtime.sampling`).
Of several ranks one draws and scores; the others only lend their parts of the logits (`lend_scores`), for the same rows in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.engine.verification import accepted_run
from glm_runtime.ops.vocab_argmax import Best
from glm_runtime.parallel.collectives import Collectives
from glm_runtime.runtime_config import VerificationChoice
from glm_runtime.sampling.logprobs import token_logprobs
from glm_runtime.sampling.parameters import has_processors, is_greedy
from glm_runtime.sampling.ratio_test import DraftedRun, Probabilities, verify_runs
from glm_runtime.sampling.rows import Sample, SampleRow
from glm_runtime.sampling.sampler import sample_rows
from kv_transfer.identity import SequenceId
from kv_transfer.messages import TokenLogprobs

LogitsOf = Callable[[Tensor, bool], tuple[Tensor, Best]]
"""fp32 logits [M, V] of rows of hidden states, and the best of each row. Without the flag the logits may be of a part of the vocabulary."""

Proposals = Mapping[SequenceId, Sequence[Probabilities]]

PROMPT_ROWS_AT_ONCE = 64
"""Prompt rows whose logits are in memory together: 40 MB at a vocabulary of 154,880."""


def draw(
    plan: StepPlan, hidden: Tensor, logits_of: LogitsOf, verification: VerificationChoice = "exact", proposals: Proposals | None = None
) -> dict[SequenceId, tuple[Sample, ...]]:
    """What stands, by sequence: the drafts that held and one token more.

    hidden: [rows, hidden] of all the plan's rows. proposals: what drafts were drawn from, by sequence, where `verification` is "ratio".
    """
    asking = [piece for piece in plan.slices if piece.sampling is not None]
    if not asking:
        return {}
    rows = [row for piece in asking for row in _rows(piece)]
    logits, best = logits_of(_sampled(plan, hidden), needs_logits(asking, verification))
    if verification == "exact":
        return _drawn(asking, sample_rows(logits, rows, best))
    return _draw_by_ratio(asking, rows, logits, proposals or {})


def needs_logits(asking: Sequence[SequenceSlice], verification: VerificationChoice) -> bool:
    """Whether more than the best token of each row is looked at. By what all ranks know of the plan, so that all say the same.

    A rank that says otherwise than the one that draws waits for an exchange that never comes.
    """
    return verification != "exact" or any(_needs_logits(piece) for piece in asking)


def _needs_logits(piece: SequenceSlice) -> bool:
    given = piece.sampling
    assert given is not None, "the slice draws nothing"
    return not is_greedy(given) or given.logprobs >= 0 or given.grammar is not None or has_processors(given, piece.token_index)


def _sampled(plan: StepPlan, hidden: Tensor) -> Tensor:
    """The rows of `hidden` after which a token is drawn."""
    places: list[int] = []
    end = 0
    for piece in plan.slices:
        end += len(piece.tokens)
        if piece.sampling is not None:
            places += range(end - piece.num_drafts - 1, end)
    return hidden if len(places) == len(hidden) else hidden.index_select(0, torch.tensor(places))


def lend_scores(plan: StepPlan, hidden: Tensor, logits_of: LogitsOf, verification: VerificationChoice) -> None:
    """Ask for what `draw` and `score_prompts` ask for, on a rank that does neither."""
    asking = [piece for piece in plan.slices if piece.sampling is not None]
    if asking:
        logits_of(_sampled(plan, hidden), needs_logits(asking, verification))
    for rows, _, _ in _scored(plan, hidden):
        logits_of(rows, True)


def tell_samples(plan: StepPlan, drawn: Mapping[SequenceId, tuple[Sample, ...]], worker: Collectives) -> dict[SequenceId, tuple[int, ...]]:
    """The tokens that stand, by sequence, on every rank of the worker. drawn: the leading rank's; of the others nothing is read."""
    if worker.size == 1:
        return {name: tuple([each.token for each in standing]) for name, standing in drawn.items()}
    asking = [piece for piece in plan.slices if piece.sampling is not None]
    if not asking:
        return {}
    firsts = list(accumulate([2 + piece.num_drafts for piece in asking], initial=0))  # of each: how many, then at most drafts + 1
    table = torch.zeros(firsts[-1], dtype=torch.int64)
    for piece, first in zip(asking, firsts, strict=False):
        tokens = [each.token for each in drawn.get(piece.sequence_id, ())]
        table[first : first + 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
    told: list[int] = worker.broadcast(table).tolist()
    return {piece.sequence_id: tuple(told[first + 1 : first + 1 + told[first]]) for piece, first in zip(asking, firsts, strict=False)}


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
    scored: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
    for rows, piece, tokens in _scored(plan, hidden):
        logits = logits_of(rows, True)[0].cpu().numpy().astype(np.float64)
        told = [token_logprobs(row, token, piece.num_prompt_logprobs) for token, row in zip(tokens, logits, strict=True)]
        scored[piece.sequence_id] = (*scored.get(piece.sequence_id, ()), *told)
    return scored


def _scored(plan: StepPlan, hidden: Tensor) -> Iterator[tuple[Tensor, SequenceSlice, Sequence[int]]]:
    """Rows of `hidden`, a few at a time, whose slice they are of, and the prompt token after each."""
    start = 0
    for piece in plan.slices:
        for first in range(0, len(piece.following), PROMPT_ROWS_AT_ONCE):
            tokens = piece.following[first : first + PROMPT_ROWS_AT_ONCE]
            yield hidden[start + first : start + first + len(tokens)], piece, tokens
        start += len(piece.tokens)
