"""Philox against its published vectors, and the addressing of noise."""

import numpy as np
import pytest

from glm_runtime.sampling.noise import Stream, noise_words, philox

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Known answers of Random123's philox4x32-10."""


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox(tuple(np.array([c], dtype=np.uint64) for c in counter), tuple(np.array([k], dtype=np.uint64) for k in key))
    assert tuple(int(word[0]) for word in words) == expected


def words(seed: int, index: int, ids: list[int]) -> list[int]:
    lanes = len(ids)
    return noise_words(np.full(lanes, seed, np.uint64), np.full(lanes, index, np.uint64), np.array(ids, np.uint64)).tolist()


def test_a_tokens_noise_does_not_depend_on_the_other_candidates() -> None:
    whole = words(2**63 + 5, 3, list(range(100)))
    assert words(2**63 + 5, 3, [0, 5, 6, 50, 99]) == [whole[token] for token in (0, 5, 6, 50, 99)]
    assert len(set(whole)) == 100


def test_seed_index_and_stream_all_matter() -> None:
    base = words(1, 1, list(range(8)))
    for other in (words(2, 1, list(range(8))), words(1, 2, list(range(8))), words(1 + 2**32, 1, list(range(8)))):
        assert not set(base) & set(other)
    assert [stream.value for stream in Stream] == [0, 1, 2, 3], "a new stream needs a number of its own"


def test_rows_side_by_side_equal_rows_alone() -> None:
    seeds = np.array([4, 4, 4, 9, 9], np.uint64)
    together = noise_words(seeds, np.array([0, 0, 0, 0, 0], np.uint64), np.array([1, 2, 8, 1, 8], np.uint64)).tolist()
    assert together == words(4, 0, [1, 2, 8]) + words(9, 0, [1, 8])
