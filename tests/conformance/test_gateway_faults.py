"""What a client sees when workers die, stall or are full, and what workers see when a client goes."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kv_transfer.messages import Ask, Cancel, FailureKind, OpenSink, StartSource
from router.gateway.tokenizer import TextTokenizer
from tests.conformance.conftest import QUICK_TIMERS, SCRIPT
from tests.fakes.fake_workers import FakeCluster, hash_model, scripted_model
from tests.fakes.gateway_process import RunningGateway, running_gateway, wait_for

COMPLETIONS = "/v1/completions"
DECODES = ("decode-0", "decode-1")
NUM_TOKENS = 60


@pytest.fixture
def hashing(workers: FakeCluster, gateway_tokenizer: TextTokenizer) -> FakeCluster:
    """Each next token depends on every one before it, at a pace that leaves time for accidents."""
    workers.model = hash_model(2500)
    workers.step_s = 0.01
    return workers


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "glm", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **fields}


def stream_tokens(gateway: RunningGateway, on_token: Callable[[int], None] = lambda _count: None, **fields: Any) -> list[int]:
    """The token ids of a streamed answer; `on_token` hears how many there are so far."""
    tokens: list[int] = []
    with httpx.stream("POST", gateway.url + COMPLETIONS, json=request(stream=True, **fields), timeout=30) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"]
                    on_token(len(tokens))
    return tokens


def calm_tokens(prompt: list[int] | None = None) -> list[int]:
    model, output = hash_model(2500), []
    for _ in range(NUM_TOKENS):
        output.append(model(prompt or [1, 2, 3], output))
    return output


def owner(workers: FakeCluster) -> str:
    """The decode worker that has the first request."""
    return next(name for name in DECODES if workers.received(name, OpenSink))


def metric(gateway: RunningGateway, name: str) -> float:
    (line,) = [line for line in gateway.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


# -- workers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_index", [0, 1, 17, NUM_TOKENS - 1])
def test_a_decode_worker_dies_and_the_stream_goes_on(gateway: RunningGateway, hashing: FakeCluster, at_index: int) -> None:
    for name in DECODES:
        hashing.workers[name].faults.crash_at_index = at_index
    hashing.workers["decode-1"].faults.crash_at_index = None
    assert stream_tokens(gateway) == calm_tokens()
    (resumed,) = hashing.received("decode-1", OpenSink)
    assert (resumed.transfer.attempt, resumed.first_index, resumed.num_prompt_tokens) == (2, at_index, 3)


def test_the_only_worker_that_is_left_restarts_and_the_stream_goes_on(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.crash("decode-1")
    hashing.workers["decode-0"].faults.crash_at_index = 20
    restarting = threading.Timer(0.8, lambda: hashing.restart("decode-0"))
    restarting.start()
    assert stream_tokens(gateway) == calm_tokens()
    restarting.join()


def test_a_prefill_worker_dies_before_the_first_token(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.prefill_s = 0.5

    def kill() -> None:
        wait_for(lambda: hashing.received("prefill-0", StartSource))
        hashing.crash("prefill-0")
        hashing.restart("prefill-0")

    killing = threading.Thread(target=kill)
    killing.start()
    assert stream_tokens(gateway) == calm_tokens()
    killing.join()


def test_a_decode_worker_that_falls_silent_is_asked_and_then_left(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.mute_at_index = 9
    assert stream_tokens(gateway) == calm_tokens()
    assert {message.next_index for message in hashing.received("decode-0", Ask)} == {9}
    (resumed,) = hashing.received("decode-1", OpenSink)
    assert resumed.first_index == 9
    hashing.workers["decode-0"].faults.is_mute = False


def test_lost_and_repeated_frames_are_made_good(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.lose_frame_at_index = 12
    hashing.workers["decode-0"].faults.repeats_frames = True
    assert stream_tokens(gateway) == calm_tokens()
    assert len(hashing.received("decode-0", OpenSink)) == 1


def test_a_lost_last_frame_is_asked_for(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.lose_frame_at_index = NUM_TOKENS - 1
    assert stream_tokens(gateway) == calm_tokens()
    assert hashing.received("decode-0", Ask)


def test_a_full_worker_costs_a_pause(gateway: RunningGateway, hashing: FakeCluster) -> None:
    for name in DECODES:
        hashing.workers[name].faults.num_busy = 2
    assert stream_tokens(gateway) == calm_tokens()


def test_a_failure_that_is_nobodys_fault_is_retried_with_the_same_seed(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["prefill-0"].faults.fail_next = (FailureKind.RETRYABLE_ELSEWHERE, "x", "internal words")
    hashing.workers["decode-0"].faults.fail_next = (FailureKind.RETRYABLE_LATER, "x", "internal words")
    assert stream_tokens(gateway) == calm_tokens()
    opened = [message for name in DECODES for message in hashing.received(name, OpenSink)]
    assert len({message.sampling.seed for message in opened}) == 1
    assert len({message.transfer for message in opened}) == len(opened)


def test_a_fault_of_the_request_is_told_and_not_retried(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.fail_next = (FailureKind.REQUEST_FAULT, "context_length_exceeded", "too long by 7")
    response = httpx.post(gateway.url + COMPLETIONS, json=request(), timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["message"] == "too long by 7"
    assert not hashing.received("decode-1", OpenSink)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_keeps_its_status(gateway: RunningGateway, hashing: FakeCluster, stream: bool) -> None:
    hashing.workers["decode-0"].faults.fail_next = (FailureKind.FATAL, "x", "internal words")
    response = httpx.post(gateway.url + COMPLETIONS, json=request(stream=stream), timeout=10)
    assert response.status_code == 500
    assert "internal words" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_a_failure_inside_a_stream_is_an_event_and_no_done(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.fail_at_index = (5, FailureKind.FATAL, "x")
    response = httpx.post(gateway.url + COMPLETIONS, json=request(stream=True), timeout=10)
    assert response.status_code == 200
    *chunks, last = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == calm_tokens()[:5]
    assert last["error"]["type"] == "server_error"
    assert "internal words" not in response.text


# -- clients -------------------------------------------------------------------------------------------------------------


def test_a_finished_request_is_closed_on_both_workers(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.workers["decode-0"].faults.ignores_cancel = 2
    stream_tokens(gateway)
    wait_for(lambda: len(hashing.received("decode-0", Cancel)) == 3, what="CANCEL is repeated until it is answered")
    assert {message.reason for message in hashing.received("decode-0", Cancel)} == {"done"}
    (cancelled,) = hashing.received("prefill-0", Cancel)
    assert cancelled.reason == "done"


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_cancelled_everywhere(gateway: RunningGateway, hashing: FakeCluster, phase: str, stream: bool) -> None:
    hashing.prefill_s = 30.0 if phase == "prefilling" else 0.0
    hashing.step_s = 0.05
    client = socket.create_connection(("127.0.0.1", gateway.port))
    body = json.dumps(request(stream=stream)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    client.sendall(head + body)
    wait_for(lambda: hashing.received("prefill-0", StartSource))
    if phase == "decoding":
        wait_for(lambda: any(sequence.output for sequence in hashing.workers["decode-0"].sequences.values()))
    client.close()
    gone_s = time.monotonic()
    wait_for(lambda: hashing.received("decode-0", Cancel) and hashing.received("prefill-0", Cancel), 2.0, "both workers are told")
    assert time.monotonic() - gone_s < 1.0
    assert hashing.received("decode-0", Cancel)[0].reason == "client_gone"
    wait_for(lambda: hashing.num_live() == 0, what="nothing is held")


def test_a_stop_string_ends_the_work(gateway: RunningGateway, workers: FakeCluster) -> None:
    workers.step_s = 0.01
    body = {"model": "glm", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stop": "there"}
    assert httpx.post(gateway.url + COMPLETIONS, json=body, timeout=10).json()["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: workers.received("decode-0", Cancel))
    assert workers.received("decode-0", Cancel)[0].reason == "stop_string"


def test_a_client_that_does_not_read_holds_nobody_up(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.step_s = 0.0
    slow = socket.create_connection(("127.0.0.1", gateway.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps(request(stream=True, max_tokens=8000)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    slow.sendall(head + body)
    wait_for(lambda: hashing.received("decode-0", OpenSink))
    started_s = time.monotonic()
    assert stream_tokens(gateway, prompt=[5]) == calm_tokens([5])
    assert time.monotonic() - started_s < 5.0
    slow.close()


def test_a_long_silence_is_filled_with_comments(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.prefill_s = 1.2
    response = httpx.post(gateway.url + COMPLETIONS, json=request(stream=True, max_tokens=2), timeout=10)
    assert response.text.startswith(": keep-alive\n\n")
    assert response.text.rstrip().endswith("data: [DONE]")


def test_many_requests_at_once(gateway: RunningGateway, hashing: FakeCluster) -> None:
    hashing.step_s = 0.001
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: stream_tokens(gateway, prompt=[number]), range(24)))
    assert answers == [calm_tokens([number]) for number in range(24)]


# -- start and end -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lone_workers(gateway_tokenizer: TextTokenizer) -> Iterator[FakeCluster]:
    """A cluster of its own, whose workers do not run yet."""
    cluster = FakeCluster(scripted_model(gateway_tokenizer.encode_raw(SCRIPT)))
    cluster.start(with_workers=False)
    yield cluster
    cluster.stop()


def test_a_gateway_without_workers_answers_and_waits(lone_workers: FakeCluster, tmp_path: Path) -> None:
    with running_gateway(tmp_path, lone_workers.directory_port, router=QUICK_TIMERS) as gateway:
        assert [gateway.get(path).status_code for path in ("/health", "/live", "/ready", "/v1/models", "/")] == [200, 200, 503, 200, 200]
        response = httpx.post(gateway.url + COMPLETIONS, json=request(), timeout=10)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "no_capacity"
        starting = threading.Timer(0.2, lone_workers.start_workers)
        starting.start()
        assert httpx.post(gateway.url + COMPLETIONS, json=request(), timeout=10).status_code == 200, "the request waited for its workers"
        starting.join()
        gateway.wait_until_ready()


def test_a_gateway_whose_directory_is_not_there_yet_answers_too(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with running_gateway(tmp_path, unused.getsockname()[1], router=QUICK_TIMERS) as gateway:
            assert gateway.get("/health").status_code == 200
            assert gateway.get("/ready").status_code == 503


def test_a_strict_gateway_names_the_unknown_field(lone_workers: FakeCluster, tmp_path: Path) -> None:
    with running_gateway(tmp_path, lone_workers.directory_port, gateway={"strict_fields": True}, router=QUICK_TIMERS) as gateway:
        response = httpx.post(gateway.url + COMPLETIONS, json=request(foo=1), timeout=10)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "foo")


def test_sigterm_finishes_what_runs_and_then_ends(lone_workers: FakeCluster, tmp_path: Path) -> None:
    lone_workers.model = hash_model(2500)
    lone_workers.start_workers()
    lone_workers.step_s = 0.02
    with running_gateway(tmp_path, lone_workers.directory_port, router=QUICK_TIMERS) as gateway:
        gateway.wait_until_ready()

        def stop_at_five(count: int) -> None:
            if count == 5:
                gateway.process.send_signal(signal.SIGTERM)

        assert stream_tokens(gateway, stop_at_five) == calm_tokens()
        assert gateway.process.wait(timeout=10) == 0
        wait_for(lambda: lone_workers.num_live() == 0)


def test_every_request_has_one_line_in_the_log(gateway: RunningGateway, hashing: FakeCluster) -> None:
    before = gateway.log().count("request ended")
    for name in DECODES:
        hashing.workers[name].faults.num_busy = 1
    stream_tokens(gateway, max_tokens=3)
    httpx.post(gateway.url + COMPLETIONS, json=request(prompt=["a", "b"], max_tokens=1), timeout=10)
    lines = [line for line in gateway.log().splitlines() if "request ended" in line]
    assert len(lines) == before + 3
    assert "outcome=done reason=done" in lines[-1]
    assert "output_tokens=1 prefill=prefill-0 decode=decode-" in lines[-1]
