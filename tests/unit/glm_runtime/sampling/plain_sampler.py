"""The sampler's specification in plain Python: one row, one number at a time. Slow, and shares nothing with it but the noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_runtime.sampling.noise import noise_words
from kv_transfer.messages import SamplingParameters

NEVER = -math.inf


@dataclass(frozen=True, kw_only=True)
class PlainRow:
    """What a row is made of, without any of the sampler's classes. allowed: by grammar; None allows all."""

    given: SamplingParameters
    token_index: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: frozenset[int] | None = None


def plain_scores(logits: Sequence[float], row: PlainRow) -> list[float]:
    """Logits after masks, bias, min_tokens, penalties and bad words."""
    given = row.given
    scores = list(logits)
    for token in range(len(scores)):
        if row.allowed is not None and token not in row.allowed:
            scores[token] = NEVER
        if given.allowed_token_ids and token not in given.allowed_token_ids:
            scores[token] = NEVER
    for token, bias in given.logit_bias:
        scores[token] += bias
    if row.token_index < given.min_tokens:
        for token in given.stop_token_ids:
            if token < len(scores):
                scores[token] = NEVER
    for token in range(len(scores)):
        count = row.output.count(token)
        if (count or token in row.prompt) and given.repetition_penalty != 1.0:
            scores[token] = scores[token] / given.repetition_penalty if scores[token] > 0 else scores[token] * given.repetition_penalty
        scores[token] -= given.frequency_penalty * count
        scores[token] -= given.presence_penalty * (count > 0)
    for word in given.bad_words:
        if list(row.output[len(row.output) - len(word) + 1 :]) == list(word[:-1]) and len(row.output) >= len(word) - 1:
            scores[word[-1]] = NEVER
    return scores


def plain_filter(scores: Sequence[float], given: SamplingParameters) -> dict[int, float]:
    """Scores over temperature of what min_p, top_k and top_p leave."""
    scaled = [score / given.temperature for score in scores]
    order = sorted((token for token in range(len(scaled)) if scaled[token] > NEVER), key=lambda token: (-scaled[token], token))
    best = scaled[order[0]]
    if given.min_p > 0:
        order = [token for token in order if scaled[token] >= best + math.log(given.min_p)]
    if given.top_k > 0:
        order = order[: given.top_k]
    if given.top_p < 1:
        total = math.fsum(math.exp(scaled[token] - best) for token in order)
        kept: list[int] = []
        mass = 0.0
        for token in order:
            if kept and mass >= given.top_p * total:
                break
            kept.append(token)
            mass += math.exp(scaled[token] - best)
        order = kept
    return {token: scaled[token] for token in sorted(order)}


def plain_sample(logits: Sequence[float], row: PlainRow) -> int:
    """The row's token."""
    scores = plain_scores(logits, row)
    if row.given.temperature < 1e-5:
        return max(range(len(scores)), key=lambda token: (scores[token], -token))
    left = plain_filter(scores, row.given)
    return max(left, key=lambda token: (left[token] + _gumbel(row, token), -token))


def plain_logprob(scores: Sequence[float], token: int) -> float:
    """log_softmax."""
    best = max(scores)
    return scores[token] - best - math.log(math.fsum(math.exp(score - best) for score in scores if score > NEVER))


def _gumbel(row: PlainRow, token: int) -> float:
    seed, index, vocabulary = (np.array([number], dtype=np.uint64) for number in (row.given.seed, row.token_index, token))
    word = int(noise_words(seed, index, vocabulary)[0])
    return -math.log(-math.log((word + 0.5) * 2.0**-32))
