"""Pools of more than one worker; and Ctrl-C, after which nothing of the cluster is left."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, start_cluster, token_ids

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pools() -> Iterator[RunningCluster]:
    running = start_cluster("--prefill", "2", "--decode", "2")
    yield running
    running.stop(signal.SIGINT)


def test_status_shows_every_worker(pools: RunningCluster) -> None:
    workers = pools.status()["workers"]
    assert [(worker["id"], worker["role"], worker["state"]) for worker in workers] == [
        ("decode-0", "decode", "serving"),
        ("decode-1", "decode", "serving"),
        ("prefill-0", "prefill", "serving"),
        ("prefill-1", "prefill", "serving"),
    ]
    assert len({worker["pid"] for worker in workers}) == 4
    for worker in workers:
        assert psutil.pid_exists(worker["pid"])
        assert worker["blocks_free"] + worker["blocks_cached"] + worker["blocks_held"] == worker["blocks_total"] > 0


def test_all_workers_take_part_and_answers_stay_equal(pools: RunningCluster, reference: Reference) -> None:
    prompts = [make_prompt(150 + 10 * number, 200 + number) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: token_ids(pools.complete(prompt, 16)), prompts))
    assert answers == reference.greedy(prompts, 16)
    pools.wait_until_quiescent()
    assert all(worker["num_steps"] > 0 for worker in pools.status()["workers"])
