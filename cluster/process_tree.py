"""Who dies with whom: the kernel's means to leave no process behind, however a parent ends.

Linux only, as the rest of the cluster.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Sequence

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (more exactly: the parent's thread that started it)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the kernel was told
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `end_descendants` misses nobody."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_reaper(pids: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start a process that waits for this one's end, however it comes, and then kills `pids`. Terminate it when they have ended."""
    command = ["/bin/sh", "-c", 'cat > /dev/null; kill -9 "$@" 2> /dev/null', "reaper", *(str(pid) for pid in pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def find_children(names: Collection[str]) -> list[psutil.Process]:
    """The direct children of this process with these names."""
    return [child for child in psutil.Process().children() if child.name() in names]


def find_ended(processes: Iterable[psutil.Process]) -> list[int]:
    """The pids of those that have ended; a zombie has."""
    return [process.pid for process in processes if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE]


def end_descendants(grace_s: float) -> list[int]:
    """Terminate, then kill every process below this one. Returns the pids that had to be killed; blocks for up to twice `grace_s`."""
    alive = psutil.Process().children(recursive=True)
    for process in alive:
        _signal(process, kill=False)
    _, stubborn = psutil.wait_procs(alive, timeout=grace_s)
    for process in stubborn:
        _signal(process, kill=True)
    psutil.wait_procs(stubborn, timeout=grace_s)
    return [process.pid for process in stubborn]


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
