"""What people read: status, progress, and why a worker has ended."""

import io
import json
from pathlib import Path

import pytest

from cluster.cluster_status import describe_run, render_json, render_table
from cluster.fleet import describe_end
from cluster.progress import Progress
from cluster.run_state import RunState
from cluster.worker_spec import configure_logging
from kv_transfer.errors import ConfigError, EngineFault
from kv_transfer.identity import Incarnation, WorkerId
from kv_transfer.messages import PairState, WorkerAddress, WorkerEntry, WorkerLoad, WorkerState, WorkerTable

RUN = RunState(
    pid=7,
    process_started_at_s=1.0,
    gateway_url="http://127.0.0.1:8000",
    directory_host="127.0.0.1",
    directory_port=1,
    secret_path="/s",
    log_dir="/logs",
)
ENTRY = WorkerEntry(
    address=WorkerAddress(WorkerId("decode-0"), Incarnation(255), "127.0.0.1", 4711),
    role="decode",
    state=WorkerState.SERVING,
    fingerprint="f",
    pid=42,
    load=WorkerLoad(blocks_total=10, blocks_free=5, blocks_cached=3, blocks_held=2, num_transfers=1),
    pairs=(PairState(WorkerId("prefill-0"), Incarnation(1), up=True), PairState(WorkerId("prefill-1"), Incarnation(1), up=False)),
)


def test_status_tells_each_workers_blocks() -> None:
    status = json.loads(render_json(describe_run(RUN, WorkerTable(1, (ENTRY,)))))
    (worker,) = status["workers"]
    assert {name: worker[name] for name in ("id", "role", "pid", "state")} == {
        "id": "decode-0",
        "role": "decode",
        "pid": 42,
        "state": "serving",
    }
    assert worker["blocks_free"] + worker["blocks_cached"] + worker["blocks_held"] == worker["blocks_total"]
    assert worker["pairs_up"] == ["prefill-0"]


def test_status_as_text_has_aligned_columns() -> None:
    head, names, row = render_table(describe_run(RUN, WorkerTable(1, (ENTRY,)))).splitlines()
    assert head.startswith("http://127.0.0.1:8000")
    assert names.index("state") == row.index("serving")


def test_status_of_a_cluster_without_workers_yet() -> None:
    assert len(render_table(describe_run(RUN, WorkerTable(0, ()))).splitlines()) == 2


class ActorDiedError(Exception):
    """Named as Ray's."""


class RayTaskError(Exception):
    """As Ray's: it wraps what the worker raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("long text\nof many lines")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "its service has ended"),
        (ActorDiedError("The actor died\nfor many reasons"), "its process has died"),
        (RayTaskError(ConfigError("is wrong", path="a.json: x")), "a.json: x: is wrong"),
        (RayTaskError(EngineFault("a step took 121 s")), "EngineFault: a step took 121 s"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_why_a_worker_has_ended_is_one_line(error: BaseException | None, words: str) -> None:
    assert describe_end(error) == words


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_line_that_events_replace() -> None:
    terminal = _Terminal()
    progress = Progress(terminal)
    progress.waiting_for(["a", "b"])
    progress.event("ready")
    assert "waiting for a, b ..." in terminal.getvalue()
    assert "\r\033[K[" in terminal.getvalue()
    assert terminal.getvalue().endswith("s] ready\n")


def test_a_pipe_gets_events_only() -> None:
    pipe = io.StringIO()
    progress = Progress(pipe)
    progress.waiting_for(["a"])
    progress.event("ready")
    assert pipe.getvalue().count("\n") == 1
    assert "waiting" not in pipe.getvalue()


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1, "handlers": {"x": {"class": "no.such.Handler"}}}'])
def test_an_unusable_logging_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "logging.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"logging\.json: is no logging configuration"):
        configure_logging(file)
