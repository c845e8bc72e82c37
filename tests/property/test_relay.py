"""Whatever dies, breaks or is lost: every request ends once, says what the calm run says, and leaves nothing behind."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.identity import RequestId
from router.config import RouterConfig
from router.lifecycle import RequestState
from tests.fakes.virtual_workers import VirtualCluster, calm_answer, coloured_token

PATIENT = RouterConfig(max_attempts=1000, request_deadline_s=1e6, worker_wait_s=1e6, block_size_tokens=4)
HASTY = dataclasses.replace(PATIENT, ask_after_s=0.3, silence_timeout_s=1.0)
"""Leaves a worker that is only slow, so that its words arrive after those of the next attempt."""
STORM_S = 20.0


def storm(cluster: VirtualCluster) -> None:
    """Break something now and then until the storm is over."""
    rng = cluster.rng
    if cluster.now_s > STORM_S:
        return
    worker = rng.choice(list(cluster.workers.values()))
    match rng.randrange(4):
        case 0:
            cluster.crash(worker, rng.uniform(0.1, 4.0))
        case 1:
            cluster.break_link(worker, rng.uniform(0.05, 3.0))
        case 2:
            worker.muted_until_s = cluster.now_s + rng.uniform(0.1, 15.0)
        case 3:
            worker.stalled_until_s = cluster.now_s + rng.uniform(0.1, 3.0)
    cluster.after(rng.expovariate(1.0), lambda: storm(cluster))


def assert_nothing_is_left(cluster: VirtualCluster) -> None:
    cluster.run(lambda: cluster.relay.farewells.num_open == 0, cluster.now_s + 200.0)
    assert cluster.relay.num_live == 0
    for view in cluster.relay.registry.views():
        assert (view.booked_requests, view.booked_decode_tokens, view.booked_prefill_tokens) == (0, 0, 0)
    for worker in cluster.workers.values():
        assert not worker.held, f"{worker.worker_id} still holds a transfer"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_prefill=st.integers(1, 2), num_decode=st.integers(1, 3), loss=st.sampled_from([0.0, 0.02, 0.1]))
def test_the_storm_costs_pauses_only(seed: int, num_prefill: int, num_decode: int, loss: float) -> None:
    rng = random.Random(seed)
    cluster = VirtualCluster(rng, PATIENT, num_prefill=num_prefill, num_decode=num_decode, capacity=4, loss=loss)
    expected = {}
    for number in range(8):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 12))]
        max_tokens = rng.randrange(1, 100)
        expected[f"r{number}"] = calm_answer(prompt, max_tokens)
        cluster.after(rng.uniform(0.0, 5.0), lambda n=number, p=prompt, m=max_tokens: cluster.submit(f"r{n}", p, m))
    storm(cluster)
    cluster.run(lambda: len(cluster.records) == len(expected), 2000.0)
    assert dict(cluster.texts) == expected
    assert {record.outcome for record in cluster.records} == {RequestState.DONE.value}
    assert len({record.request_id for record in cluster.records}) == len(expected)
    cluster.loss = 0.0
    cluster.run(lambda: cluster.now_s > STORM_S + 20.0, 2000.0)
    assert_nothing_is_left(cluster)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.05]))
def test_tokens_of_an_attempt_that_was_left_are_never_taken(seed: int, loss: float) -> None:
    """With a model that is not reproducible: every token is what its own attempt drew after exactly the tokens before it."""
    cluster = VirtualCluster(random.Random(seed), HASTY, num_prefill=1, num_decode=2, capacity=4, loss=loss, is_coloured=True)
    for number in range(4):
        cluster.submit(f"r{number}", [number + 1], 400)
    storm(cluster)
    cluster.run(lambda: len(cluster.records) == 4, 2000.0)
    for number in range(4):
        tokens, attempt = [number + 1], 0
        for token in cluster.texts[RequestId(f"r{number}")]:
            assert token % 64 >= attempt
            attempt = token % 64
            assert token == coloured_token(tokens, attempt)
            tokens.append(token)
        assert len(tokens) == 401


def test_a_hundred_requests_on_four_slots_all_succeed() -> None:
    rng = random.Random(3)
    config = RouterConfig(max_attempts=3, request_deadline_s=1e6, worker_wait_s=1e6)
    cluster = VirtualCluster(rng, config, num_prefill=1, num_decode=1, capacity=4, loss=0.0)
    expected = {f"r{number}": calm_answer([number + 1], 20) for number in range(100)}
    for number in range(100):
        cluster.submit(f"r{number}", [number + 1], 20)
    cluster.run(lambda: len(cluster.records) == 100, 3000.0)
    assert dict(cluster.texts) == expected
    assert sum(record.attempts for record in cluster.records) < 1000, "a full worker is probed by one request, not by all"
    assert_nothing_is_left(cluster)


@pytest.mark.parametrize("abort_at_s", [0.01, 0.06, 0.3, 0.7, 1.5])
def test_an_abort_reaches_both_workers_in_any_phase(abort_at_s: float) -> None:
    cluster = VirtualCluster(random.Random(5), PATIENT, num_prefill=1, num_decode=1, capacity=4, loss=0.0)
    cluster.submit("r", [1, 2, 3], 1000)
    cluster.after(abort_at_s, lambda: cluster.relay.abort(next(iter(cluster.outputs)), "client_gone"))
    cluster.run(lambda: len(cluster.records) == 1, 100.0)
    cluster.run(lambda: cluster.now_s > abort_at_s + 0.2, 100.0)
    assert_nothing_is_left(cluster)
