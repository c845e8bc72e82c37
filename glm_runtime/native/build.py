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
import subprocess
import tempfile
import time
from collections.abc import Sequence
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
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, sources, target)
    except OSError as error:
        raise BuildFailed(f"cannot write compiled kernels to {directory}: {error}; make the directory writable") from error
    return target


def are_kernels_expected(choice: KernelsChoice) -> bool:
    """Whether the compiled kernels will serve under this choice, as far as can be told without compiling anything."""
    return choice != "torch" and _compiler() is not None and set(NEEDED_FEATURES) <= set(_processor().split())


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _find_compiler() -> str:
    found = _compiler()
    if found is None:
        raise BuildFailed(f"no C++ compiler was found (tried {', '.join(COMPILERS)}); on Debian and Ubuntu: apt-get install g++")
    return found


def _cache_directory() -> Path:
    """XDG's place for what can be made again; a private one when there is no home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "glm-cluster"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"glm-cluster-{os.getuid()}"


def _digest(compiler: str, source_directory: Path) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
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
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        running = [
            subprocess.Popen([compiler, *FLAGS, "-c", str(source), "-o", str(made)], stderr=subprocess.PIPE, text=True)
            for source, made in zip(sources, objects, strict=True)
        ]
        for source, process in zip(sources, running, strict=True):
            _wait(process, str(source))
        made = Path(scratch) / target.name
        linking = [compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(made)]
        _wait(subprocess.Popen(linking, stderr=subprocess.PIPE, text=True), str(made))
        made.replace(target)
    logger.info("kernels compiled compiler=%s seconds=%.1f path=%s", compiler, time.monotonic() - started_s, target)


def _wait(process: "subprocess.Popen[str]", what: str) -> None:
    try:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildFailed(f"compiling {what} took more than {_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise BuildFailed(f"compiling {what} failed with status {process.returncode}: {errors.strip()[:2000]}")
