"""Log-probabilities of a token and of the largest beside it.

Knows: log-softmax of one row and the order of equals. Does not know which of the row's distributions it is given.
"""

import numpy as np
from numpy.typing import NDArray

from kv_transfer.request_values import TokenLogprobs

Scores = NDArray[np.float64]


def token_logprobs(scores: Scores, token: int, num_top: int) -> TokenLogprobs:
    """log_softmax(scores)[token], its rank, and the `num_top` largest, equals by id. scores: [V] fp64; -inf has probability 0.

    Rounds: fp64 inside, each result once to fp32. The sum over the vocabulary has one order for a row, whatever its step.
    """
    best = scores.max()
    normaliser = best + np.log(np.add.reduce(np.exp(scores - best)))
    own = scores[token]
    rank = 1 + int((scores > own).sum()) + int((scores[:token] == own).sum())
    top = [(int(each), _rounded(scores[each] - normaliser)) for each in _largest(scores, num_top)]
    return TokenLogprobs(_rounded(own - normaliser), rank, tuple(top))


def _largest(scores: Scores, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest, largest first, equals by id."""
    count = min(count, len(scores))
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    floor = np.partition(scores, -count)[-count]
    ids = np.flatnonzero(scores >= floor)
    found: NDArray[np.int64] = ids[np.argsort(-scores[ids], kind="stable")[:count]]
    return found


def _rounded(value: float) -> float:
    return float(np.float32(value))
