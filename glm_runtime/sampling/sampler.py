"""Draws one token per row. A row's token depends on its logits and its `SampleRow`; on nothing else, and not on the other rows.

Order: grammar mask, allowed tokens, logit bias, min_tokens, penalties, bad words (`processors.py`); greedy rows then take the largest.
The others: temperature, min_p, top_k, top_p (`filters.py`), then Gumbel-max over what is left: argmax(score - log(-log(u))). That is an
exact draw from the softmax, and needs one number per candidate, which is why it can be keyed by (seed, token index) and replayed.

So verification needs no sampler of its own: the row after each draft draws what it would have drawn without speculation, and the
draft is right when it is that token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glm_runtime.ops.vocab_argmax import Best, vocab_argmax
from glm_runtime.sampling.filters import candidates
from glm_runtime.sampling.logprobs import token_logprobs
from glm_runtime.sampling.noise import noise_words
from glm_runtime.sampling.parameters import GREEDY_BELOW_TEMPERATURE, has_processors, is_greedy
from glm_runtime.sampling.processors import NEVER, process
from glm_runtime.sampling.rows import Sample, SampleRow
from kv_transfer.request_values import LogprobsMode, SamplingParameters, TokenLogprobs

NUMBERS_AT_ONCE = 1 << 16
"""Logits that are copied to fp64 together, a row at least: their 512 KiB stay in a core's cache. More of them took up to three times as
long per row, at vocabularies of 2,560 and of 154,880 (Zen 5, 1 thread)."""

NOISE_SPAN = 26.1
"""Largest minus smallest noise: u lies in [2^-33, 1 - 2^-33], so -log(-log(u)) lies in [-3.14, 22.88]. A token so far below the best
never wins, and gets no noise."""

Scores = NDArray[np.float64]
Ids = NDArray[np.int64]


def sample(logits: Tensor, parameters: Sequence[SamplingParameters], token_indices: Sequence[int]) -> list[int]:
    """`sample_rows` for rows without histories, masks and drafts: one token id per row."""
    rows = [SampleRow(parameters=given, token_index=index) for given, index in zip(parameters, token_indices, strict=True)]
    return [drawn.token for drawn in sample_rows(logits, rows)]


def sample_rows(logits: Tensor, rows: Sequence[SampleRow], best: Best | None = None) -> list[Sample]:
    """One sample per row of logits [M, V] fp32; greedy ties go to the smallest id. Pure: no row is changed.

    Logits must be finite. Rows of one request after its drafts are rows like any other. best: `vocab_argmax` of the logits, where it is
    known.
    """
    tokens: list[int] = (best or vocab_argmax(logits)).ids.tolist()
    samples = [Sample(token) for token in tokens]
    others = [index for index, row in enumerate(rows) if not _is_plain(row)]
    rows_at_once = max(NUMBERS_AT_ONCE // logits.shape[1], 1)
    for first in range(0, len(others), rows_at_once):
        part = others[first : first + rows_at_once]
        given = [rows[index] for index in part]
        raw = logits[part].cpu().numpy().astype(np.float64)
        scores = process(raw, given) if any(map(_is_processed, given)) else raw
        drawn = _choose(given, scores)
        for number, (index, token) in enumerate(zip(part, drawn, strict=True)):
            samples[index] = Sample(token, _logprobs(given[number], raw[number], scores[number], token))
    return samples


def target_scores(logits: Tensor, rows: Sequence[SampleRow]) -> Scores:
    """What `sample_rows` draws from, as scores [M, V] fp64: softmax over a row gives its distribution; -inf is what it cannot draw.

    A greedy row has 0 at its token and -inf elsewhere. For verification that needs probabilities; drawing from it does not.
    """
    scores = process(logits.cpu().numpy().astype(np.float64), rows)
    for row, row_scores in zip(rows, scores, strict=True):
        if is_greedy(row.parameters):
            token = row_scores.argmax()
            row_scores[:] = NEVER
            row_scores[token] = 0.0
        elif _has_filters(row.parameters):
            row_scores[:] = _filtered(row.parameters, row_scores)
        else:
            row_scores /= row.parameters.temperature
    return scores


def _is_processed(row: SampleRow) -> bool:
    return row.mask is not None or has_processors(row.parameters, row.token_index)


def _is_plain(row: SampleRow) -> bool:
    """Whether the largest logit is all there is to say. Asked of every row of every step, hence in few calls."""
    given = row.parameters
    return given.temperature < GREEDY_BELOW_TEMPERATURE and given.logprobs < 0 and not _is_processed(row)


def _choose(rows: Sequence[SampleRow], scores: Scores) -> list[int]:
    """One token per row; the noise of all rows is made at once, since a small vocabulary makes it a matter of calls."""
    chosen: list[int] = scores.argmax(-1).tolist()
    noisy = [index for index, row in enumerate(rows) if not is_greedy(row.parameters)]
    if not noisy:
        return chosen
    left = [_scaled_candidates(rows[index].parameters, scores[index]) for index in noisy]
    noise = _gumbel([rows[index] for index in noisy], [ids for ids, _ in left])
    start = 0
    for index, (ids, scaled) in zip(noisy, left, strict=True):
        chosen[index] = int(ids[(scaled + noise[start : start + len(ids)]).argmax()])
        start += len(ids)
    return chosen


def _scaled_candidates(given: SamplingParameters, scores: Scores) -> tuple[Ids, Scores]:
    """Ids that could win, ascending, and their scores over temperature."""
    scaled = scores / given.temperature
    ids = _candidates(given, scaled) if _has_filters(given) else np.flatnonzero(scaled >= scaled.max() - NOISE_SPAN)
    return ids, scaled[ids]


def _has_filters(given: SamplingParameters) -> bool:
    return given.top_k > 0 or given.top_p < 1.0 or given.min_p > 0.0


def _gumbel(rows: Sequence[SampleRow], ids: Sequence[Ids]) -> Scores:
    """-log(-log(u)) of each row's ids, row after row."""
    sizes = [len(each) for each in ids]
    seeds = np.repeat(np.array([row.parameters.seed & (2**64 - 1) for row in rows], dtype=np.uint64), sizes)
    indices = np.repeat(np.array([row.token_index for row in rows], dtype=np.uint64), sizes)
    words = noise_words(seeds, indices, np.concatenate(ids).astype(np.uint64))
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: Scores = -np.log(-np.log(uniform))
    return noise


def _logprobs(row: SampleRow, raw: Scores, scores: Scores, token: int) -> TokenLogprobs | None:
    given = row.parameters
    if given.logprobs < 0:
        return None
    told = raw
    if given.logprobs_mode is LogprobsMode.PROCESSED:
        told = scores if is_greedy(given) else _filtered(given, scores)
    return token_logprobs(told, token, given.logprobs)


def _candidates(given: SamplingParameters, scaled: Scores) -> Ids:
    return candidates(scaled, top_k=given.top_k, top_p=given.top_p, min_p=given.min_p)


def _filtered(given: SamplingParameters, scores: Scores) -> Scores:
    scaled = scores / given.temperature
    ids = _candidates(given, scaled)
    filtered = np.full_like(scaled, NEVER)
    filtered[ids] = scaled[ids]
    return filtered
