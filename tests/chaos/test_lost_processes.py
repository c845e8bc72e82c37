"""kill -9 of each process while it matters: streams pause and go on with the tokens of a calm run, and nobody keeps a block."""

import os
import shutil
import signal
import time

import httpx
import psutil
import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, Streaming, end_all, launch_cluster, token_ids, wait_until

pytestmark = pytest.mark.cluster


def _wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    wait_until(condition, 60, lambda: f"{what} did not happen")


def test_the_prefill_worker_dies_while_it_streams_chunks(cluster: RunningCluster, reference: Reference) -> None:
    # Several, because a worker's row is up to a second old: by then one prompt alone may be done.
    prompts = [make_prompt(6000, number) for number in (300, 310, 320, 330)]
    before = cluster.worker("decode-0")["bytes_read"]
    pid = cluster.worker("prefill-0")["pid"]
    streams = [Streaming(cluster, prompt, 24) for prompt in prompts]
    _wait_for(lambda: cluster.worker("decode-0")["bytes_read"] > before, "the first chunk's transfer")
    assert not all(stream.tokens for stream in streams), "it must die before all prompts are done"
    os.kill(pid, signal.SIGKILL)
    assert [stream.finish() for stream in streams] == reference.greedy(prompts, 24)
    cluster.wait_until_serving()
    assert cluster.worker("prefill-0")["pid"] != pid
    cluster.wait_until_quiescent()


def test_the_decode_worker_dies_in_the_middle_of_an_answer(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(150, 301)
    pid = cluster.worker("decode-0")["pid"]
    streaming = Streaming(cluster, prompt, 300)
    _wait_for(lambda: len(streaming.tokens) >= 20, "twenty tokens")
    os.kill(pid, signal.SIGKILL)
    assert len(streaming.tokens) < 300, "it must die before the answer is done"
    assert [streaming.finish()] == reference.greedy([prompt], 300)
    cluster.wait_until_serving()
    assert cluster.worker("decode-0")["pid"] != pid
    cluster.wait_until_quiescent()


def test_a_client_that_leaves_frees_everything(cluster: RunningCluster) -> None:
    for max_tokens in (1000, 3000):
        events = cluster.stream(make_prompt(1000, 302), max_tokens)
        next(events)
        events.close()  # type: ignore[attr-defined]
    cluster.wait_until_quiescent()


def test_the_gateway_dies_and_comes_back(cluster: RunningCluster, reference: Reference) -> None:
    (gateway,) = [child for child in psutil.Process(cluster.process.pid).children() if "router.gateway" in child.cmdline()]
    events = cluster.stream(make_prompt(100, 303), 2000)
    next(events)
    gateway.kill()
    with pytest.raises((httpx.HTTPError, AssertionError)):
        list(events)
    _wait_for(lambda: _is_ready(cluster), "the next gateway")
    prompt = make_prompt(100, 304)
    assert [token_ids(cluster.complete(prompt, 16))] == reference.greedy([prompt], 16)
    cluster.wait_until_quiescent()


def test_nothing_outlives_a_killed_supervisor(cluster: RunningCluster) -> None:
    running = launch_cluster()
    running.wait_until_ready()
    below = psutil.Process(running.process.pid).children(recursive=True)
    assert any("router.gateway" in process.cmdline() for process in below)
    running.process.kill()
    running.process.wait()
    assert end_all(below, grace_s=15) == []
    assert running.status() == {"workers": []}, "a dead cluster is not found"
    shutil.rmtree(running.temp_dir)


@pytest.mark.slow
def test_a_stopped_worker_is_replaced(cluster: RunningCluster, reference: Reference) -> None:
    """SIGSTOP: Ray never notices; the missing reports do."""
    pid = cluster.worker("decode-0")["pid"]
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    prompt = make_prompt(150, 305)
    assert [token_ids(cluster.complete(prompt, 16))] == reference.greedy([prompt], 16)
    assert time.monotonic() - started_s > 5
    assert cluster.worker("decode-0")["pid"] != pid


def _is_ready(cluster: RunningCluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
