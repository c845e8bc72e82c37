"""Whatever changes logits before the temperature does, in its order: masks, bias, min_tokens, penalties, bad words.

Knows: each rule, applied to all rows of a call at once. Does not know temperatures, filters or noise. The order is that of vLLM's V2
runner; masks commute with everything, so theirs is only the cheapest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.parameters import bans_end, has_penalties
from glm_runtime.sampling.rows import SampleRow

NEVER = -np.inf

Table = NDArray[np.float64]


def process(logits: Table, rows: Sequence[SampleRow]) -> Table:
    """Scores [M, V] fp64, new, from logits [M, V] fp64. What may not be drawn is -inf.

    A row that has nothing left is taken again under its masks alone: min_tokens and bad words give way, then the allowed tokens; a
    grammar only when it allows nothing itself.
    """
    scores = logits.copy()
    _apply_masks(scores, rows)
    _allow(scores, rows)
    _add_bias(scores, rows)
    _ban(scores, *_end_lanes(rows, scores.shape[1]))
    _penalise(scores, rows)
    _ban(scores, *_bad_word_lanes(rows))
    for index, row in enumerate(rows):
        if _is_restricted(row) and scores[index].max() == NEVER:
            scores[index] = _relax(logits[index], row)
    return scores


def _is_restricted(row: SampleRow) -> bool:
    given = row.parameters
    return row.mask is not None or bool(given.allowed_token_ids or given.bad_words) or bans_end(given, row.token_index)


def _relax(logits: NDArray[np.float64], row: SampleRow) -> NDArray[np.float64]:
    for steps in ((_apply_masks, _allow), (_apply_masks,)):
        scores = logits[None].copy()
        for step in steps:
            step(scores, [row])
        if scores.max() > NEVER:
            relaxed: NDArray[np.float64] = scores[0]
            return relaxed
    return logits


def _apply_masks(scores: Table, rows: Sequence[SampleRow]) -> None:
    for index, row in enumerate(rows):
        if row.mask is not None:
            bits = np.unpackbits(row.mask.numpy().view(np.uint8), bitorder="little")[: scores.shape[1]]
            scores[index, bits == 0] = NEVER


def _allow(scores: Table, rows: Sequence[SampleRow]) -> None:
    for index, row in enumerate(rows):
        if row.parameters.allowed_token_ids:
            ids = np.array(row.parameters.allowed_token_ids)
            kept = scores[index, ids]
            scores[index] = NEVER
            scores[index, ids] = kept


def _add_bias(scores: Table, rows: Sequence[SampleRow]) -> None:
    biased = [index for index, row in enumerate(rows) if row.parameters.logit_bias]
    if not biased:
        return
    lanes = np.repeat(biased, [len(rows[index].parameters.logit_bias) for index in biased])
    pairs = [pair for index in biased for pair in rows[index].parameters.logit_bias]
    ids = np.array([token for token, _ in pairs])
    scores[lanes, ids] += np.array([value for _, value in pairs])  # each id once, so += adds each


def _end_lanes(rows: Sequence[SampleRow], vocabulary: int) -> tuple[list[int], list[int]]:
    """(row, id) of the tokens that may not yet end the output."""
    lanes, ids = [], []
    for index, row in enumerate(rows):
        if bans_end(row.parameters, row.token_index):
            for token in row.parameters.stop_token_ids:
                if token < vocabulary:
                    lanes.append(index)
                    ids.append(token)
    return lanes, ids


def _bad_word_lanes(rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
    """(row, id) of each last token of a bad word whose other tokens are the last of the output."""
    lanes, ids = [], []
    for index, row in enumerate(rows):
        words = row.parameters.bad_words
        if not words:
            continue
        longest = max(map(len, words)) - 1
        tail = _history(row).tail(longest, row.drafts) if longest else []
        for word in words:
            before = len(word) - 1
            if before <= len(tail) and tail[len(tail) - before :] == list(word[:-1]):
                lanes.append(index)
                ids.append(word[-1])
    return lanes, ids


def _ban(scores: Table, lanes: list[int], ids: list[int]) -> None:
    if lanes:
        scores[lanes, ids] = NEVER


def _penalise(scores: Table, rows: Sequence[SampleRow]) -> None:
    """repetition (prompt and output): above 0 divided, else multiplied; then frequency x count and presence x (count > 0), output only."""
    penalised = [index for index, row in enumerate(rows) if has_penalties(row.parameters)]
    if not penalised:
        return
    counted = [_history(rows[index]).counted(rows[index].drafts) for index in penalised]
    sizes = [len(ids) for ids, _, _ in counted]
    lanes = np.repeat(np.array(penalised), sizes)
    ids = np.concatenate([ids for ids, _, _ in counted])
    counts = np.concatenate([counts for _, counts, _ in counted])
    is_seen = np.concatenate([is_prompt for _, _, is_prompt in counted]) | (counts > 0)

    def each(name: str) -> NDArray[np.float64]:
        return np.repeat(np.array([getattr(rows[index].parameters, name) for index in penalised], dtype=np.float64), sizes)

    values = scores[lanes, ids]
    factors = np.where(is_seen, each("repetition_penalty"), 1.0)
    values = np.where(values > 0, values / factors, values * factors)
    values -= each("frequency_penalty") * counts
    values -= each("presence_penalty") * (counts > 0)
    scores[lanes, ids] = values


def _history(row: SampleRow) -> TokenHistory:
    assert row.history is not None, "the parameters read the history, and the row has none"
    return row.history
