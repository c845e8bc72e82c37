"""Verification by the ratio of probabilities, for drafts that are drawn from what the MTP layer thinks, or are its best guess.

p_t: a row's distribution after all processing. p_d: that of its draft d; for a best guess it is 1 at d. A draft holds iff
u < p_t(d) / p_d(d); the first that does not is replaced by a draw from max(p_t - p_d, 0), normalised, and after the last draft one more
token is drawn from p_t. What comes out has distribution p_t, whatever p_d is (Leviathan et al., "Fast inference from transformers via
speculative decoding", ICML 2023; Chen et al., arXiv 2302.01318), and more drafts hold than by `sample_rows`: the sum of min(p_t, p_d).

The price: a token depends on the drafts, hence on the batch and on the attempt, and so a resumed request may go on with other tokens.
Noise is keyed by (seed, token index, what it is for), so the same batches give the same tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_runtime.sampling.logprobs import token_logprobs
from glm_runtime.sampling.noise import Stream, uniforms
from glm_runtime.sampling.rows import Sample, SampleRow
from glm_runtime.sampling.sampler import NUMBERS_AT_ONCE, target_scores
from kv_transfer.request_values import LogprobsMode

Probabilities = NDArray[np.float32]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]


class DraftSource(msgspec.Struct, frozen=True):
    """How the drafts of one row are drawn. token_index: which output token of the request the first of them guesses."""

    seed: int
    token_index: int
    temperature: float


class DraftedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one sequence: one more than drafts, each after the drafts before it.

    drafts: ids outside the vocabulary never hold. proposed: [V] of each draft, which it was drawn from; None where it is a best guess,
    or nobody knows what it was drawn from: p_d = 1 at the draft is exact for any draft that does not depend on the noise of the test.
    """

    rows: Sequence[SampleRow]
    drafts: Sequence[int]
    proposed: Sequence[Probabilities] | None = None


def propose(logits: Tensor, sources: Sequence[DraftSource], number: int) -> tuple[Ids, list[Probabilities]]:
    """Draw the draft `number` (from 0) of each row: ids [R], and p_d [V] of each.

    logits: [R, V] fp32, of the MTP layer. p_d = softmax(logits / temperature); other processors are left to verification.
    Rounds: p_d to fp32; the draft is drawn from what was rounded.
    """
    temperatures = torch.tensor([source.temperature for source in sources], dtype=torch.float64)
    rounded: Probabilities = torch.softmax(logits.double() / temperatures[:, None], dim=-1).float().numpy()
    words = uniforms([source.seed for source in sources], [source.token_index + number for source in sources], Stream.DRAFT)
    return _invert(rounded.astype(np.float64), words), list(rounded)


def verify_runs(logits: Tensor, runs: Sequence[DraftedRun]) -> list[tuple[Sample, ...]]:
    """What stands of each run, one token at least. logits: [M, V] fp32, the rows of all runs in their order. Pure."""
    stands: list[tuple[Sample, ...]] = []
    start = 0
    for part in _parts(runs, logits.shape[1]):
        end = start + sum([len(run.rows) for run in part])
        stands += _verify(logits[start:end], part)
        start = end
    return stands


def _parts(runs: Sequence[DraftedRun], vocabulary: int) -> Iterator[list[DraftedRun]]:
    """Runs whose rows stay in a core's cache together, one at least."""
    part: list[DraftedRun] = []
    num_rows = 0
    for run in runs:
        if part and (num_rows + len(run.rows)) * vocabulary > NUMBERS_AT_ONCE:
            yield part
            part, num_rows = [], 0
        part.append(run)
        num_rows += len(run.rows)
    if part:
        yield part


def _verify(logits: Tensor, runs: Sequence[DraftedRun]) -> Iterator[tuple[Sample, ...]]:
    rows = [row for run in runs for row in run.rows]
    scores = target_scores(logits, rows)
    target = np.exp(scores - scores.max(-1, keepdims=True))
    target /= target.sum(-1, keepdims=True)
    firsts = np.cumsum([0, *(len(run.rows) for run in runs)])[:-1]
    num_held = _num_held(target, rows, runs, firsts)
    lasts = firsts + num_held
    weights = target[lasts]
    for number, run in enumerate(runs):
        if num_held[number] < len(run.drafts):
            weights[number] = _left_over(weights[number], run, int(num_held[number]))
    ends = [rows[row] for row in lasts]
    drawn = _invert(weights, uniforms([row.parameters.seed for row in ends], [row.token_index for row in ends], Stream.RECOVER))
    for run, first, held, last in zip(runs, firsts.tolist(), num_held.tolist(), drawn.tolist(), strict=True):
        tokens = (*run.drafts[:held], last)
        yield tuple([_sample(rows[first + place], logits, scores, first + place, token) for place, token in enumerate(tokens)])


def _num_held(target: Weights, rows: Sequence[SampleRow], runs: Sequence[DraftedRun], firsts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of each run, drafts up to the first that does not hold."""
    places = [int(first) + number for first, run in zip(firsts, runs, strict=True) for number in range(len(run.drafts))]
    if not places:
        return np.zeros(len(runs), dtype=np.intp)
    drafts = np.array([draft for run in runs for draft in run.drafts], dtype=np.int64)
    is_token = (drafts >= 0) & (drafts < target.shape[1])
    wanted = target[places, np.where(is_token, drafts, 0)]
    proposed = np.array([chance for run in runs for chance in _chances(run, target.shape[1])])
    tested = [rows[place] for place in places]
    noise = uniforms([row.parameters.seed for row in tested], [row.token_index for row in tested], Stream.ACCEPT)
    holds = is_token & (noise * proposed < wanted)
    num_held, start = [], 0
    for run in runs:
        own = holds[start : start + len(run.drafts)]
        start += len(run.drafts)
        num_held.append(len(own) if own.all() else int(own.argmin()))
    return np.array(num_held, dtype=np.intp)


def _chances(run: DraftedRun, vocabulary: int) -> list[float]:
    """p_d of each draft."""
    if run.proposed is None:
        return [1.0] * len(run.drafts)
    return [float(each[draft]) if 0 <= draft < vocabulary else 1.0 for draft, each in zip(run.drafts, run.proposed, strict=True)]


def _left_over(target: Weights, run: DraftedRun, number: int) -> Weights:
    """Weights of what replaces draft `number`: p_t without what p_d has had its chance of."""
    draft = run.drafts[number]
    if not 0 <= draft < len(target):
        return target
    if run.proposed is not None:
        left = np.maximum(target - run.proposed[number], 0.0)
    else:
        left = target.copy()
        left[draft] = 0.0
    return left if left.any() else target  # p_t = p_d but for rounding


def _invert(weights: Weights, noise: Weights) -> Ids:
    """One id per row of weights [N, V]: the first whose running sum exceeds noise times the whole. An id of weight 0 never is."""
    sums = np.cumsum(weights, axis=-1)
    whole = sums[:, -1]
    bound = np.minimum(noise * whole, np.nextafter(whole, 0.0))
    drawn: Ids = (sums > bound[:, None]).argmax(-1)
    return drawn


def _sample(row: SampleRow, logits: Tensor, scores: Weights, place: int, token: int) -> Sample:
    given = row.parameters
    if given.logprobs < 0:
        return Sample(token)
    is_processed = given.logprobs_mode is LogprobsMode.PROCESSED
    told = scores[place] if is_processed else logits[place].cpu().numpy().astype(np.float64)
    return Sample(token, token_logprobs(told, token, given.logprobs))
