"""Which tokens a row may draw: min_p, then top_k, then top_p, each on what the one before it left.

Knows: one row of scores at a time, fp64. Does not know noise. Sums are formed in an order that depends on the row alone.
"""

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Ids = NDArray[np.int64]


def candidates(scores: Scores, *, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids that may be drawn, ascending, from logits over temperature [V]; -inf never is. The most probable token always stays.

    Where nothing may be drawn, all being -inf, or where the largest is beyond all numbers, it is the first of the largest alone.

    min_p keeps p >= min_p x the largest p. top_k keeps the k largest, ties to the smaller id. top_p keeps the shortest prefix of the
    rest, by falling probability (ties: smaller id first), whose mass reaches top_p.
    """
    best = scores.max()
    if not math.isfinite(best):
        return np.array([scores.argmax()], dtype=np.int64)
    floor = best + math.log(min_p) if min_p > 0.0 else -np.inf
    if 0 < top_k < len(scores):
        floor = max(floor, np.partition(scores, -top_k)[-top_k])
    ids = np.flatnonzero(scores >= floor) if floor > -np.inf else np.flatnonzero(scores > -np.inf)
    if 0 < top_k < len(ids):
        ids = ids[_largest(scores[ids], top_k)]
    if top_p < 1.0:
        ids = _shortest_prefix(ids, scores[ids], best, top_p)
    return ids


def _shortest_prefix(ids: Ids, scores: Scores, best: float, top_p: float) -> Ids:
    weights = np.exp(scores - best)
    total = np.add.reduce(weights)
    # Tokens below this have together less than half of what is cut: the prefix ends before the first of them.
    is_near = weights >= 0.5 * (1.0 - top_p) * total / len(ids)
    near = scores[is_near]
    ranked = np.exp(np.sort(near)[::-1] - best)
    num_kept = max(int((np.cumsum(ranked) - ranked < top_p * total).sum()), 1)
    prefix: Ids = ids[is_near][_largest(near, num_kept)]
    return prefix


def _largest(scores: Scores, count: int) -> NDArray[np.bool_]:
    """Which are the `count` largest, of equals the first: selecting is several times as fast as a stable sort."""
    floor = np.partition(scores, -count)[-count]
    is_kept: NDArray[np.bool_] = scores > floor
    is_kept[np.flatnonzero(scores == floor)[: count - int(is_kept.sum())]] = True
    return is_kept
