"""Prefix index: bounded, least recently used out, whole chains only."""

import random

from kv_transfer.identity import Incarnation, WorkerId
from router.policy import WorkerRef
from router.prefix_index import PrefixIndex

ONE = WorkerRef(WorkerId("a"), Incarnation(1))
TWO = WorkerRef(WorkerId("b"), Incarnation(2))


def chain(*names: str) -> list[bytes]:
    """Keys as block_keys makes them: each stands for everything before it."""
    return ["/".join(names[: count + 1]).encode() for count in range(len(names))]


def test_the_longest_common_prefix_is_found() -> None:
    index = PrefixIndex(100)
    index.record(ONE, chain("x", "y", "z"))
    assert index.match(ONE, chain("x", "y", "q", "r")) == 2
    assert index.match(ONE, chain("x", "y", "z")) == 3
    assert index.match(ONE, chain("q")) == 0
    assert index.match(ONE, []) == 0
    assert index.match(TWO, chain("x")) == 0


def test_a_dropped_worker_is_forgotten() -> None:
    index = PrefixIndex(100)
    index.record(ONE, chain("x"))
    index.drop(ONE)
    index.drop(ONE)
    assert index.match(ONE, chain("x")) == 0


def test_tails_are_evicted_first_and_the_bound_holds() -> None:
    index = PrefixIndex(3)
    index.record(ONE, chain("x", "y", "z"))
    index.record(ONE, chain("x", "q"))
    assert index.num_keys(ONE) == 3
    assert index.match(ONE, chain("x", "y", "z")) == 2
    assert index.match(ONE, chain("x", "q")) == 2
    index.record(ONE, chain("a", "b", "c", "d", "e"))
    assert index.match(ONE, chain("a", "b", "c", "d", "e")) == 3


def test_bisection_equals_a_walk() -> None:
    rng = random.Random(7)
    index = PrefixIndex(40)
    for _ in range(400):
        names = [str(rng.randrange(3)) for _ in range(rng.randrange(1, 12))]
        keys = chain(*names)
        walked = 0
        while walked < len(keys) and index.match(ONE, keys[: walked + 1]) == walked + 1:
            walked += 1
        assert index.match(ONE, keys) == walked
        index.record(ONE, keys)
        assert index.match(ONE, keys) == len(keys)
