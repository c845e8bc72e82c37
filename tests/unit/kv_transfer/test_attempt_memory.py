"""What was here is remembered until its time is over, and forgetting does not cost more the more is remembered."""

import time

from kv_transfer.attempt_memory import AttemptMemory
from kv_transfer.identity import Incarnation, RequestId, TransferId


def transfer(name: str, attempt: int = 1) -> TransferId:
    return TransferId(RequestId(name), attempt, Incarnation(1), Incarnation(2))


def test_an_attempt_is_remembered_until_its_time_is_over_and_so_is_every_smaller_one() -> None:
    memory = AttemptMemory()
    memory.note(transfer("a", 2), 10.0)
    memory.note(transfer("a", 1), 5.0)
    assert memory.has_seen(transfer("a", 1))
    assert not memory.has_seen(transfer("a", 3))
    memory.forget_until(9.9)
    assert memory.has_seen(transfer("a", 2))
    memory.forget_until(10.0)
    assert not memory.has_seen(transfer("a", 1))


def test_nothing_outlives_the_longest_time_that_was_asked_for() -> None:
    memory = AttemptMemory()
    for number in range(50):
        memory.note(transfer(str(number)), 100.0 - number)
    memory.forget_until(99.9)
    assert memory.has_seen(transfer("0"))
    memory.forget_until(100.0)
    assert not any(memory.has_seen(transfer(str(number))) for number in range(50))


def test_a_tick_does_not_look_at_everything_that_is_remembered() -> None:
    memory = AttemptMemory()
    for number in range(50_000):
        memory.note(transfer(str(number)), 600.0 + number * 0.01)
    began_s = time.perf_counter()
    for tick in range(200):
        memory.forget_until(tick * 0.1)
    assert time.perf_counter() - began_s < 0.1
    memory.forget_until(2000.0)
    assert time.perf_counter() - began_s < 1.0
    assert not memory.has_seen(transfer("49999"))
