"""A real cluster for tests: `glm-cluster serve` as a child process on a free port, with a temporary directory of its own.

It is spoken to as a user would: HTTP, `glm-cluster status --json`, signals. It is ended by its pid, and what it leaves is counted.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

COMMAND = str(Path(sys.executable).parent / "glm-cluster")
START_TIMEOUT_S = 150.0
REQUEST_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
QUIET_TIMEOUT_S = 30.0
POLL_S = 0.1
SETTLED_S = 2.2
"""More than two reports of a worker, one of which may just have been under way."""


class RunningCluster:
    """One `serve` process. `url` is set once it is ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", temp_dir: Path, output: Path) -> None:
        self.process = process
        self.temp_dir = temp_dir
        self.output = output
        self.url = ""

    @property
    def output_text(self) -> str:
        """What `serve` has printed so far."""
        return self.output.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """`glm-cluster status --json`."""
        done = subprocess.run(
            [COMMAND, "status", "--json"], capture_output=True, text=True, check=False, timeout=30, env=environment(self.temp_dir)
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {"workers": []}

    def worker(self, worker_id: str) -> dict[str, Any]:
        """One worker's row."""
        return next(worker for worker in self.status()["workers"] if worker["id"] == worker_id)

    def settled_worker(self, worker_id: str) -> dict[str, Any]:
        """One worker's row once it counts all that was asked for so far: workers report once a second."""
        row, since_s = self.worker(worker_id), time.monotonic()
        while time.monotonic() - since_s < SETTLED_S:
            time.sleep(POLL_S)
            newest = self.worker(worker_id)
            if newest != row:
                row, since_s = newest, time.monotonic()
        return row

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """POST /v1/completions with text or token ids, greedy, not stopped by end tokens; the whole answer."""
        response = httpx.post(f"{self.url}/v1/completions", json=_body(prompt, max_tokens, parameters), timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, prompt: Sequence[int], max_tokens: int, **parameters: Any) -> Iterator[list[int]]:
        """The same as a stream: the token ids of each event. Fails on an error event or a stream without its end."""
        body = {**_body(prompt, max_tokens, parameters), "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield from (choice["token_ids"] for choice in event["choices"] if choice.get("token_ids"))
        raise AssertionError("the stream ended without [DONE]")

    def wait_until_ready(self) -> None:
        """Wait for the first moment at which a request could be served."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.output_text}\n{self.log_tails()}"
            status = self.status()
            self.url = status.get("url", "")
            return bool(self.url) and "ready: serving" in self.output_text

        wait_until(is_ready, START_TIMEOUT_S, lambda: f"not ready:\n{self.output_text}\n{self.log_tails()}")

    def wait_until_serving(self) -> None:
        """Wait until every worker serves again, with its pairs up."""

        def all_serve() -> bool:
            workers = self.status()["workers"]
            num_prefill = sum(worker["role"] == "prefill" for worker in workers)
            return bool(workers) and all(
                worker["state"] == "serving" and (worker["role"] == "prefill" or len(worker["pairs_up"]) == num_prefill)
                for worker in workers
            )

        wait_until(all_serve, START_TIMEOUT_S, lambda: f"not serving: {self.status()}\n{self.log_tails()}")

    def wait_until_quiescent(self) -> None:
        """Wait until no block is held and no transfer is known anywhere, and every pool's own audit says so too."""

        def is_quiescent() -> bool:
            workers = self.status()["workers"]
            return bool(workers) and all(
                worker["blocks_held"] == 0
                and worker["num_transfers"] == 0
                and worker["is_pool_audited"]
                and worker["blocks_free"] + worker["blocks_cached"] + worker["blocks_quarantined"] == worker["blocks_total"] > 0
                for worker in workers
                if worker["state"] == "serving"
            )

        wait_until(is_quiescent, QUIET_TIMEOUT_S, lambda: f"something is still held: {json.dumps(self.status()['workers'], indent=1)}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal `serve`, wait for its end and check that no process of it is left."""
        below = [] if self.process.poll() is not None else psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        self.wait_for_end(below)

    def wait_for_end(self, below: Sequence[psutil.Process]) -> str:
        """Wait for the end of `serve`, which was told to stop, and check that no process below it is left. Returns its output."""
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        finally:
            left = end_all(below)
            self.process.kill()
            output = self.output_text
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        assert code == 0, f"serve ended with {code}:\n{output}"
        assert not left, f"left behind: {left}\n{output}"
        return output

    def log_tails(self, num_lines: int = 15) -> str:
        """The last lines of every log of the run, for the message of a failed test."""
        logs = sorted(self.temp_dir.glob("glm-cluster-*/*/logs/*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) for log in logs)


class Streaming:
    """A request on a thread of its own; `tokens` grows as events arrive."""

    def __init__(self, cluster: RunningCluster, prompt: list[int], max_tokens: int, **parameters: Any) -> None:
        self.tokens: list[int] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(cluster.stream(prompt, max_tokens, **parameters),))
        self._thread.start()

    def _run(self, events: Iterator[list[int]]) -> None:
        try:
            for tokens in events:
                self.tokens += tokens
        except BaseException as error:
            self._error = error

    def finish(self) -> list[int]:
        """Wait for the end of the stream and return its tokens; raises what ended it otherwise."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.tokens


def token_ids(answer: dict[str, Any]) -> list[int]:
    """The output tokens of a completion's only choice."""
    (choice,) = answer["choices"]
    return list(choice["token_ids"])


def cached_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens that were not computed for this answer."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _body(prompt: Sequence[int] | str, max_tokens: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "glm",
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **parameters,
    }


def environment(temp_dir: Path) -> dict[str, str]:
    """This environment with another temporary directory: the cluster and its `status` need no argument to meet there."""
    return {**os.environ, "TMPDIR": str(temp_dir)}


def start_cluster(*options: str, config: str = "") -> RunningCluster:
    """Start `serve` with these options (and this TOML) and wait until it is ready; cleans up when it does not come up."""
    running = launch_cluster(*options, config=config)
    try:
        running.wait_until_ready()
        running.wait_until_serving()
    except BaseException:
        below = [] if running.process.poll() is not None else psutil.Process(running.process.pid).children(recursive=True)
        running.process.terminate()
        running.process.wait(STOP_TIMEOUT_S)
        end_all(below)
        shutil.rmtree(running.temp_dir, ignore_errors=True)
        raise
    return running


def launch_cluster(*options: str, config: str = "") -> RunningCluster:
    """Start `serve` and return at once."""
    temp_dir = Path(tempfile.mkdtemp(prefix="g-"))  # short: Ray's socket paths lie below it
    output = temp_dir / "output"
    arguments = [COMMAND, "serve", "--port", "0", *options]
    if config:
        (temp_dir / "cluster.toml").write_text(config)
        arguments += ["--config", str(temp_dir / "cluster.toml")]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, env=environment(temp_dir)
        )
    return RunningCluster(process, temp_dir, output)


def end_all(processes: Sequence[psutil.Process], grace_s: float = 5.0) -> list[str]:
    """Wait for these processes and kill those that stay. Returns what had to be killed."""
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    names = []
    for process in left:
        try:
            names.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return names


def wait_until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Poll until the condition holds; fails with the description."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"after {timeout_s:g} s: {describe()}"
        time.sleep(POLL_S)
