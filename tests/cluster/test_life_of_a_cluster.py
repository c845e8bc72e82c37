"""Pools of more than one worker; and what is left of a cluster that ends, however it ends: nothing."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, launch_cluster, start_cluster, token_ids, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pools() -> Iterator[RunningCluster]:
    running = start_cluster("--prefill", "2", "--decode", "2")
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


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


def test_ctrl_c_lets_a_stream_finish_and_leaves_nothing(pools: RunningCluster, reference: Reference) -> None:
    """The signal goes to the whole process group, as a terminal sends it. Last in this file: it ends the cluster."""
    prompt = make_prompt(100, 220)
    events = pools.stream(prompt, 150)
    streamed = next(events)
    below = psutil.Process(pools.process.pid).children(recursive=True)
    os.killpg(pools.process.pid, signal.SIGINT)
    for tokens in events:
        streamed += tokens
    assert [streamed] == reference.greedy([prompt], 150)
    pools.wait_for_end(below)
    assert pools.status() == {"workers": []}


def test_a_second_ctrl_c_hurries() -> None:
    running = start_cluster()
    events = running.stream(make_prompt(100, 221), 4000)
    next(events)
    below = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping: " in running.output_text, 10, lambda: running.output_text)
    asked_s = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    output = running.wait_for_end(below)
    assert time.monotonic() - asked_s < 15, "the drain time is 30 s"
    assert "requests in flight" in output
    events.close()  # type: ignore[attr-defined]


def test_ctrl_c_while_it_starts_leaves_nothing() -> None:
    running = launch_cluster()
    wait_until(lambda: "Ray runs" in running.output_text, 60, lambda: running.output_text)
    below = psutil.Process(running.process.pid).children(recursive=True)
    assert below
    running.process.send_signal(signal.SIGINT)
    running.wait_for_end(below)


def test_a_start_that_fails_half_way_leaves_nothing() -> None:
    """The gateway cannot bind what the check could: its folder for the tokenizer is not one."""
    running = launch_cluster(config='[gateway]\ntokenizer_dir = "/"\n')
    code = running.process.wait(90)
    output = running.output_text
    assert code == 1
    assert "error: the gateway failed 3 times to start" in output
    assert "Traceback" not in output
    left = [process for process in psutil.process_iter(["cmdline"]) if str(running.temp_dir) in " ".join(process.info["cmdline"] or [])]
    assert not left
    shutil.rmtree(running.temp_dir)
