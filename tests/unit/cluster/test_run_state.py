"""A running cluster is found without arguments; what is left of dead ones is not, and is cleared away."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import run_state
from cluster.run_state import RunState, find_runs, make_run_dir, open_state_dir, write_run_state, write_secret
from kv_transfer.errors import ConfigError

NO_PID = 2**22 + 1
"""Above the largest pid there can be."""


def _state(run_dir: Path, *, pid: int, started_at_s: float) -> RunState:
    return RunState(
        pid=pid,
        process_started_at_s=started_at_s,
        gateway_url="http://127.0.0.1:8000",
        directory_host="127.0.0.1",
        directory_port=4711,
        secret_path=str(run_dir / run_state.SECRET_FILE),
        log_dir=str(run_dir / "logs"),
    )


def _own_state(run_dir: Path) -> RunState:
    started_at_s = run_state.process_started_at_s(os.getpid())
    assert started_at_s is not None
    return _state(run_dir, pid=os.getpid(), started_at_s=started_at_s)


def test_a_running_cluster_is_found_again(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path / "state")
    state = _own_state(run_dir)
    write_run_state(run_dir, state)
    assert find_runs(tmp_path / "state") == [state]


def test_no_state_directory_means_no_cluster(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "never-made") == []


def test_the_state_of_a_dead_process_is_ignored_and_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    run_dir = make_run_dir(tmp_path / "state")
    write_secret(run_dir)
    (run_dir / "ray" / "session_1" / "logs").mkdir(parents=True)
    (run_dir / "ray" / "session_1" / "logs" / "raylet.out").write_text("why it died")
    (run_dir / "ray" / "session_latest").symlink_to(run_dir / "ray" / "session_1")
    write_run_state(run_dir, _state(run_dir, pid=child.pid, started_at_s=1.0))
    assert find_runs(tmp_path / "state") == []
    assert not (run_dir / run_state.STATE_FILE).exists()
    assert not (run_dir / run_state.SECRET_FILE).exists()
    assert not (run_dir / "ray").exists()
    assert (run_dir / "logs" / "ray" / "raylet.out").read_text() == "why it died"


def test_another_process_under_the_same_pid_is_not_our_cluster(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path / "state")
    write_run_state(run_dir, _state(run_dir, pid=os.getpid(), started_at_s=1.0))
    assert find_runs(tmp_path / "state") == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_state_file_is_no_cluster(tmp_path: Path, content: str) -> None:
    run_dir = make_run_dir(tmp_path / "state")
    (run_dir / run_state.STATE_FILE).write_text(content)
    assert find_runs(tmp_path / "state") == []


def test_only_the_owner_may_read_a_run(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path / "state")
    secret = write_secret(run_dir)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_bytes()) == 32


def test_secrets_differ_from_run_to_run(tmp_path: Path) -> None:
    first = write_secret(make_run_dir(tmp_path / "state")).read_bytes()
    second = write_secret(make_run_dir(tmp_path / "state")).read_bytes()
    assert first != second


def test_a_state_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory of this user"):
        open_state_dir(tmp_path / "state")


def test_a_state_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        open_state_dir(tmp_path / "file" / "state")


def test_logs_of_the_newest_ended_runs_stay(tmp_path: Path) -> None:
    state_dir = open_state_dir(tmp_path / "state")
    for number in range(8):
        old = state_dir / f"r{NO_PID + number}"
        (old / "logs").mkdir(parents=True)
        os.utime(old, (number, number))
    run_dir = make_run_dir(state_dir)
    assert {path.name for path in state_dir.iterdir()} == {f"r{NO_PID + number}" for number in range(3, 8)} | {run_dir.name}


def test_what_else_lies_in_a_chosen_directory_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    others = [tmp_path / name for name in ("photos", "r1", "12345", "a", "b", "c", "d", "e")]
    for other in others:
        other.mkdir()
    find_runs(tmp_path)
    make_run_dir(tmp_path)
    assert all(other.is_dir() for other in others)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
