"""Compiles the C++ sources once per machine and keeps the result in the user's cache directory.

Knows: compiler, flags, cache. Does not know what the functions are (`library.py`). The name of the result is a digest of sources,
flags, compiler and processor, so that a changed source or another machine never meets an old build.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from glm_runtime.runtime_config import KernelsChoice

logger = logging.getLogger(__name__)

SOURCE_DIRECTORY = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",  # GCC 12 sees `__m512 y = y` in its own headers
)
"""No -ffast-math: the order of sums is part of what the deterministic mode promises. Products are fused where the source says so."""

NEEDED_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
"""As /proc/cpuinfo names what `simd.hpp` asks for."""

UNUSED_S = 30 * 86400.0
"""Libraries that nobody has asked for in this time go when another one is compiled."""

_TIMEOUT_S = 300.0


class BuildFailed(Exception):
    """The kernels cannot be compiled here. The message says why and what to do."""


def build_library(cache_directory: Path | None = None, source_directory: Path = SOURCE_DIRECTORY) -> Path:
    """The shared object of this machine's kernels, compiled now if it was not before (some ten seconds).

    Safe to call from several processes at once: one compiles, the others wait. Raises BuildFailed.
    """
    compiler = _find_compiler()
    sources = sorted(source_directory.glob("*.cpp"))
    directory = cache_directory or _cache_directory()
    target = directory / f"kernels-{_digest(compiler, source_directory)}.so"
    if os.path.exists(target):  # also where the directory cannot be written, as in an image that brings its kernels
        with suppress(OSError):
            os.utime(target)
        return target
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / f"{target.name}.lock").open("w")
    with lock:
        with _writing(directory):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, sources, target)
            _drop_unused(directory, target)
    return target


def _drop_unused(directory: Path, target: Path) -> None:
    """Remove what earlier versions and other processors have left. Who has one of them loaded keeps it until it ends."""
    oldest_s = time.time() - UNUSED_S
    for path in (*directory.glob("kernels-*.so"), *directory.glob("kernels-*.so.lock")):
        with suppress(OSError):
            found = path.stat()
            if not path.name.startswith(target.name) and max(found.st_atime, found.st_mtime) < oldest_s:
                path.unlink()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildFailed(f"cannot write compiled kernels to {directory}: {error}; make the directory writable") from error


def are_kernels_expected(choice: KernelsChoice) -> bool:
    """Whether the compiled kernels will serve under this choice, as far as can be told without compiling anything."""
    return choice != "torch" and _compiler() is not None and not missing_features()


def missing_features() -> tuple[str, ...]:
    """Which instruction sets this processor lacks for the compiled kernels."""
    there = set(_processor().split())
    return tuple(feature for feature in NEEDED_FEATURES if feature not in there)


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _find_compiler() -> str:
    found = _compiler()
    if found is None:
        raise BuildFailed(f"no C++ compiler was found (tried {', '.join(COMPILERS)}); on Debian and Ubuntu: apt-get install g++")
    return found


def _cache_directory() -> Path:
    """XDG's place for what can be made again; a private one when there is no home. Raises BuildFailed."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "glm-cluster"
    except RuntimeError:
        return _private_directory()


def _private_directory() -> Path:
    """Where everybody may write, a directory whose libraries nobody else can have put there: they run with this process's rights."""
    directory = Path(tempfile.gettempdir()) / f"glm-cluster-{os.getuid()}"
    with _writing(directory):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                fresh = Path(tempfile.mkdtemp(prefix="glm-cluster-"))
                logger.warning("kernel cache not safe, compiling into another path=%s instead=%s", directory, fresh)
                return fresh
    return directory


def _digest(compiler: str, source_directory: Path) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildFailed(f"{compiler} cannot be started: {error}") from error
    parts = [compiler, version, *FLAGS, _processor()]
    parts += [f"{path.name}\0{path.read_text()}" for path in sorted(source_directory.iterdir()) if path.suffix in (".cpp", ".hpp")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What -march=native looks at: the instruction sets of this processor."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "") if cpuinfo.exists() else ""
    )
    return f"{platform.machine()} {flags}"


def _compile(compiler: str, sources: Sequence[Path], target: Path) -> None:
    started_s = time.monotonic()
    with _writing(target.parent):
        scratch = tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True)
    with scratch:
        objects = [Path(scratch.name) / f"{source.stem}.o" for source in sources]
        commands = {
            str(source): [compiler, *FLAGS, "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects, strict=True)
        }
        _run_all(commands, scratch.name)
        made = Path(scratch.name) / target.name
        _run_all({str(target): [compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(made)]}, scratch.name)
        with _writing(target.parent):
            made.replace(target)
    logger.info("kernels compiled compiler=%s seconds=%.1f path=%s", compiler, time.monotonic() - started_s, target)


def _run_all(commands: Mapping[str, Sequence[str]], scratch: str) -> None:
    """Run compilers at the same time, by what each makes. At the first that fails the others are ended: nothing writes on after this."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for what, command in commands.items():
            running[what] = _start(command, scratch)
        for what, process in running.items():
            _wait(process, what)
    except BaseException:
        for process in running.values():
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        raise


def _start(command: Sequence[str], scratch: str) -> "subprocess.Popen[str]":
    """A group of its own: the compiler's parts are processes that would outlive it."""
    environment = {**os.environ, "TMPDIR": scratch}
    try:
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, process_group=0)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be started: {error}") from error


def _wait(process: "subprocess.Popen[str]", what: str) -> None:
    try:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"compiling {what} took more than {_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise BuildFailed(f"compiling {what} failed with status {process.returncode}: {errors.strip()[:2000]}")
