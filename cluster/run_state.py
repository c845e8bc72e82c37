"""Where a running cluster leaves its address, so that `glm-cluster status` finds it whatever its port.

Knows: the per-user directory, one folder per run, the state file in it and how to tell that a run has ended. Does not know
what runs. A run folder holds the secret, the gateway's configuration and logs; only its owner may read it (mode 0700).
"""

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kv_transfer.errors import ConfigError

STATE_FILE = "run.json"
SECRET_FILE = "secret"
SECRET_BYTES = 32
RUN_DIR_NAME = re.compile(r"r(?P<pid>[0-9]+)")
"""A run's folder is named after its supervisor's pid; short, since socket paths lie below it."""
ENDED_RUNS_KEPT = 5
"""Folders of ended runs that stay for their logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """One running cluster. `process_started_at_s` tells its supervisor from a later process under the same pid."""

    pid: int
    process_started_at_s: float
    gateway_url: str
    directory_host: str
    directory_port: int
    secret_path: str
    log_dir: str


def default_state_dir() -> Path:
    """The directory that all clusters of this user on this host share. Short, as Ray's socket paths below it may have 107 bytes."""
    return Path(tempfile.gettempdir()) / f"glm-cluster-{os.getuid()}"


def open_state_dir(path: Path) -> Path:
    """Create the directory if need be, for its owner only; one that exists is left as it is, whatever else lies in it.

    Raises ConfigError when it belongs to somebody else or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"the state directory cannot be made: {error.strerror}", path=str(path)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError("the state directory is not a directory of this user; remove it or choose another one", path=str(path))
    return path


def make_run_dir(state_dir: Path) -> Path:
    """A new folder for this process's run, readable by its owner only. Folders of ended runs beyond the newest few are removed."""
    open_state_dir(state_dir)
    ended = sorted((run_dir for run_dir in _run_dirs(state_dir) if not _is_alive(run_dir)), key=_age)
    for run_dir in ended[: max(0, len(ended) - ENDED_RUNS_KEPT)]:
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir = state_dir / f"r{os.getpid()}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(mode=0o700)
    (run_dir / "logs").mkdir()
    return run_dir


def write_secret(run_dir: Path) -> Path:
    """A fresh secret that only its owner can read."""
    path = run_dir / SECRET_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    return path


def process_started_at_s(pid: int) -> float | None:
    """When the process with this pid was started, or None when there is none (a zombie is none)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def write_run_state(run_dir: Path, state: RunState) -> None:
    """Make the run findable. Written beside and renamed: a reader sees all of it or nothing."""
    beside = run_dir / f".{STATE_FILE}"
    beside.write_text(json.dumps(asdict(state), indent=1))
    beside.replace(run_dir / STATE_FILE)


def close_run_dir(run_dir: Path) -> None:
    """The run has ended: forget its address and its secret, keep its logs and those of Ray."""
    (run_dir / STATE_FILE).unlink(missing_ok=True)
    (run_dir / SECRET_FILE).unlink(missing_ok=True)
    ray_logs = run_dir / "ray" / "session_latest" / "logs"
    if ray_logs.is_dir() and not (run_dir / "logs" / "ray").exists():
        shutil.move(ray_logs.resolve(), run_dir / "logs" / "ray")
    shutil.rmtree(run_dir / "ray", ignore_errors=True)


def find_runs(state_dir: Path) -> list[RunState]:
    """The clusters that run now, newest first. State files whose process has ended are removed on the way."""
    if not state_dir.is_dir() or state_dir.stat().st_uid != os.getuid():
        return []
    running = []
    for run_dir in _run_dirs(state_dir):
        state = _read(run_dir)
        if state is not None and process_started_at_s(state.pid) == state.process_started_at_s:
            running.append(state)
        elif (run_dir / STATE_FILE).exists():
            close_run_dir(run_dir)
    return sorted(running, key=lambda state: state.process_started_at_s, reverse=True)


def _run_dirs(state_dir: Path) -> list[Path]:
    """The folders of runs: what is named otherwise is not ours."""
    return [path for path in state_dir.iterdir() if RUN_DIR_NAME.fullmatch(path.name) and (path / "logs").is_dir()]


def _read(run_dir: Path) -> RunState | None:
    try:
        return RunState(**json.loads((run_dir / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_alive(run_dir: Path) -> bool:
    """Whether the process that made this folder may still use it; its name is that process's pid."""
    state = _read(run_dir)
    if state is not None:
        return process_started_at_s(state.pid) == state.process_started_at_s
    name = RUN_DIR_NAME.fullmatch(run_dir.name)
    return name is not None and process_started_at_s(int(name["pid"])) is not None


def _age(run_dir: Path) -> float:
    return run_dir.stat().st_mtime
