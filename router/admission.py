"""Whether a request may enter, and how long it may wait: decided here, answered by whoever asked.

Knows: the bounds. Does not know clocks or queues; the caller passes what it sees.
"""

from dataclasses import dataclass

from kv_transfer.errors import Draining, NoCapacity, Overloaded, QueueFull
from router.config import RouterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionView:
    """What admission looks at. num_in_flight counts every live request, num_waiting those without a worker."""

    is_draining: bool
    num_in_flight: int
    num_waiting: int


def find_refusal(view: AdmissionView, config: RouterConfig, num_requests: int = 1) -> Overloaded | None:
    """Why `num_requests` more may not enter now, or None when they may."""
    retry_after_s = config.overloaded_retry_after_s
    if view.is_draining:
        return Draining("this gateway is shutting down; send the request again, another one will take it", retry_after_s=retry_after_s)
    if view.num_in_flight + num_requests > config.max_in_flight_requests:
        return QueueFull(
            f"{view.num_in_flight} requests are in flight and the limit is {config.max_in_flight_requests}; try again later",
            retry_after_s=retry_after_s,
        )
    if view.num_waiting + num_requests > config.max_waiting_requests:
        return QueueFull(
            f"{view.num_waiting} requests wait for a worker and the limit is {config.max_waiting_requests}; try again later",
            retry_after_s=retry_after_s,
        )
    return None


def find_wait_refusal(waited_s: float, *, was_dispatched: bool, config: RouterConfig) -> NoCapacity | None:
    """Why a request may wait no longer for a worker, or None when it may.

    A request that already had a worker waits until its own deadline: a lone worker that is being restarted costs a pause.
    """
    if was_dispatched or waited_s < config.worker_wait_s:
        return None
    return NoCapacity(
        f"no prefill and decode worker became usable within {config.worker_wait_s:g} s; try again later",
        retry_after_s=config.overloaded_retry_after_s,
    )


def may_retry(*, retryable: bool, num_failures: int, now_s: float, deadline_s: float, config: RouterConfig) -> bool:
    """The whole retry policy: retryable, attempts left, deadline ahead."""
    return retryable and num_failures < config.max_attempts and now_s < deadline_s


def retry_delay_s(num_failures: int, config: RouterConfig) -> float:
    """Pause before the next attempt: none after the first failure, then doubling up to a ceiling."""
    if num_failures <= 1:
        return 0.0
    delay_s: float = config.retry_backoff_s * 2.0 ** (num_failures - 2)
    return min(delay_s, config.max_retry_backoff_s)
