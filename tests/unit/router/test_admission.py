"""Who may enter, how long one may wait, when one may try again."""

import pytest

from kv_transfer.errors import Draining, NoCapacity, QueueFull
from router.admission import AdmissionView, find_refusal, find_wait_refusal, may_retry, retry_delay_s
from router.config import RouterConfig

CONFIG = RouterConfig(
    max_in_flight_requests=10, max_waiting_requests=4, worker_wait_s=5.0, max_attempts=3, retry_backoff_s=0.1, max_retry_backoff_s=0.5
)


def view(in_flight: int = 0, waiting: int = 0, *, draining: bool = False) -> AdmissionView:
    return AdmissionView(is_draining=draining, num_in_flight=in_flight, num_waiting=waiting)


def test_the_bounds_are_sharp() -> None:
    assert find_refusal(view(9, 3), CONFIG) is None
    assert isinstance(find_refusal(view(10, 0), CONFIG), QueueFull)
    assert isinstance(find_refusal(view(4, 4), CONFIG), QueueFull)
    assert isinstance(find_refusal(view(0, 0), CONFIG, num_requests=5), QueueFull)


def test_a_draining_gateway_admits_nobody_and_says_when_to_come_back() -> None:
    refusal = find_refusal(view(draining=True), CONFIG)
    assert isinstance(refusal, Draining)
    assert refusal.retry_after_s > 0


def test_waiting_without_any_worker_ends_but_a_restart_is_waited_for() -> None:
    assert find_wait_refusal(4.9, was_dispatched=False, config=CONFIG) is None
    assert isinstance(find_wait_refusal(5.0, was_dispatched=False, config=CONFIG), NoCapacity)
    assert find_wait_refusal(500.0, was_dispatched=True, config=CONFIG) is None


@pytest.mark.parametrize(
    ("retryable", "num_failures", "now_s", "expected"),
    [(True, 2, 0.0, True), (True, 3, 0.0, False), (False, 1, 0.0, False), (True, 1, 9.0, False)],
)
def test_the_retry_policy_is_one_sentence(retryable: bool, num_failures: int, now_s: float, expected: bool) -> None:
    assert may_retry(retryable=retryable, num_failures=num_failures, now_s=now_s, deadline_s=9.0, config=CONFIG) is expected


def test_the_first_retry_is_at_once_and_later_ones_wait_longer() -> None:
    assert [retry_delay_s(count, CONFIG) for count in range(1, 6)] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.5])
