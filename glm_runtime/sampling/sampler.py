"""Draws one token per row. A row's token depends on its logits, its parameters, its seed and its token index; on nothing else.

Order: temperature, top-k, top-p, then Gumbel-max over what is left: argmax(logit / temperature - log(-log(u))). That is an exact
draw from the softmax, and needs one number per candidate, which is why it can be keyed and replayed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glm_runtime.ops.vocab_argmax import Best, vocab_argmax
from glm_runtime.sampling.noise import noise_words
from kv_transfer.messages import SamplingParameters

GREEDY_BELOW_TEMPERATURE = 1e-5
_ROWS_AT_ONCE = 16
"""Bounds the fp64 copies of a large vocabulary; throughput does not depend on it."""


def sample(logits: Tensor, parameters: Sequence[SamplingParameters], token_indices: Sequence[int], best: Best | None = None) -> list[int]:
    """One token id per row of logits [M, V] fp32; greedy ties go to the smallest id.

    token_indices: which output token of its request each row draws. best: `vocab_argmax` of the logits, where it is known.
    """
    tokens: list[int] = (best or vocab_argmax(logits)).ids.tolist()
    drawn = [row for row, given in enumerate(parameters) if given.temperature >= GREEDY_BELOW_TEMPERATURE]
    for first in range(0, len(drawn), _ROWS_AT_ONCE):
        rows = drawn[first : first + _ROWS_AT_ONCE]
        chosen = _draw(logits[rows], [parameters[row] for row in rows], [token_indices[row] for row in rows])
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, parameters: Sequence[SamplingParameters], token_indices: Sequence[int]) -> list[int]:
    temperatures = torch.tensor([given.temperature for given in parameters], dtype=torch.float64)
    scaled = logits.double() / temperatures[:, None]
    rows, ids = keep_candidates(scaled, parameters).nonzero(as_tuple=True)
    lanes = rows.numpy()
    seeds = np.array([given.seed & (2**64 - 1) for given in parameters], dtype=np.uint64)[lanes]
    indices = np.array(token_indices, dtype=np.uint64)[lanes]
    words = noise_words(seeds, indices, ids.numpy().astype(np.uint64)).astype(np.int64)
    uniform = (torch.from_numpy(words).double() + 0.5) * 2.0**-32
    noisy = torch.full_like(scaled, float("-inf"))
    noisy[rows, ids] = scaled[rows, ids] - torch.log(-torch.log(uniform))
    chosen: list[int] = noisy.argmax(-1).tolist()
    return chosen


def keep_candidates(scaled: Tensor, parameters: Sequence[SamplingParameters]) -> Tensor:
    """Which tokens survive top-k, then top-p: [M, V] bool from logits over temperature [M, V] fp64.

    top-k keeps the k largest, ties to the smaller id. top-p keeps the shortest prefix of the rest, by falling probability, whose
    mass reaches top_p; the most probable token always stays.
    """
    vocabulary = scaled.shape[1]
    if all(given.top_k <= 0 and given.top_p >= 1.0 for given in parameters):
        return torch.ones_like(scaled, dtype=torch.bool)
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    limits = torch.tensor([given.top_k if given.top_k > 0 else vocabulary for given in parameters])
    masses = torch.tensor([given.top_p for given in parameters], dtype=torch.float64)
    is_kept = torch.arange(vocabulary) < limits[:, None]
    weights = torch.exp(ranked - ranked[:, :1]).masked_fill_(~is_kept, 0.0)
    # The running sum's last entry is the total: a row's sum is then formed in the same order whatever the batch.
    running = weights.cumsum(-1)
    is_kept &= (running - weights < masses[:, None] * running[:, -1:]) | (masses >= 1.0)[:, None]
    is_kept[:, 0] = True
    return torch.zeros_like(is_kept).scatter_(1, order, is_kept)
