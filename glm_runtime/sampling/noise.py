"""Counter-based random numbers: any word of any stream by its address, without state.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). key = seed; counter = (group of four
vocabulary ids, token index, stream, 0). So the noise of a token does not depend on the batch, on what was drawn before, or on
which part of the vocabulary is looked at, and a GPU kernel can make the same words.
"""

from collections.abc import Sequence
from enum import IntEnum, unique

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


@unique
class Stream(IntEnum):
    """What the words are for; two uses of one (seed, token index) must not share them."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words per lane, in uint64 arrays. All arrays broadcast to one shape; values are below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def noise_words(seeds: Words, token_indices: Words, token_ids: Words, stream: Stream = Stream.SAMPLE) -> Words:
    """One 32-bit word per lane for (seed, token index, vocabulary id). All [N], lanes of one row adjacent and ids ascending."""
    groups = token_ids >> np.uint64(2)
    starts = np.ones(len(groups), dtype=bool)
    starts[1:] = (groups[1:] != groups[:-1]) | (seeds[1:] != seeds[:-1]) | (token_indices[1:] != token_indices[:-1])
    seeds, indices = seeds[starts], token_indices[starts]
    zero = np.zeros_like(indices)
    counter = (groups[starts], indices & _LOW, zero + np.uint64(stream), indices >> _HALF)
    words = np.stack(philox(counter, (seeds & _LOW, seeds >> _HALF)))  # [4, groups]
    picked: Words = words[(token_ids & np.uint64(3)).astype(np.intp), np.cumsum(starts) - 1]
    return picked


def uniforms(seeds: Sequence[int], token_indices: Sequence[int], stream: Stream) -> NDArray[np.float64]:
    """One number of (0, 1) per lane for (seed, token index, stream), with 52 bits: (n + 1/2) / 2^52."""
    keys = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    indices = np.array(token_indices, dtype=np.uint64)
    zero = np.zeros_like(indices)
    high, low, _, _ = philox((zero, indices & _LOW, zero + np.uint64(stream), indices >> _HALF), (keys & _LOW, keys >> _HALF))
    numbers: NDArray[np.float64] = (((high << np.uint64(20)) | (low >> np.uint64(12))).astype(np.float64) + 0.5) * 2.0**-52
    return numbers
