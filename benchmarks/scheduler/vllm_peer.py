"""vLLM's V1 scheduler as a process of its own, with what it needs in a directory of the cache.

Only the Python files of vLLM's wheel are taken: the scheduler needs no kernel, and the wheel's libraries want another torch than ours.
Everything else that it imports comes from this interpreter's packages, and the few that are missing there are installed beside it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine.cached_setup import PeerUnavailable, cache_dir
from benchmarks.engine.engine_process import EngineFailed, EngineProcess, EngineSpec

VLLM_VERSION = "0.33.0"
ALSO = (
    "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors", "depyf", "einops", "gguf", "openai-harmony",
    "partial-json-parser", "pillow", "py-cpuinfo", "pybase64", "pyzmq", "xgrammar",
)  # fmt: skip
DRIVER = Path(__file__).parent / "vllm_driver.py"
TIMEOUT_S = 300.0


class VllmPeer:
    """A running scheduler."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def steps(self, num_requests: int, has_drafts: bool, num_steps: int) -> list[float]:
        """Seconds of `schedule` and `update_from_output` of each step. Raises EngineFailed."""
        return self._process.ask("steps", (num_requests, int(has_drafts), num_steps))


@contextmanager
def start_vllm(*, may_install: bool) -> Iterator[VllmPeer | PeerUnavailable]:
    """The running peer, or why there is none."""
    try:
        directory = _installed(may_install=may_install)
        spec = EngineSpec(system="vLLM", variant="V1 scheduler", command=(sys.executable, "-P", str(DRIVER), str(directory)))
        with EngineProcess(spec, cache_dir(), num_threads=1, timeout_s=TIMEOUT_S) as process:
            yield VllmPeer(process)
    except (PeerUnavailable, EngineFailed) as error:
        yield PeerUnavailable(str(error))


def _installed(*, may_install: bool) -> Path:
    """The directory to put on the path. Takes a download of half a gigabyte the first time; raises PeerUnavailable."""
    directory = cache_dir() / f"vllm-{VLLM_VERSION}-{sysconfig.get_python_version()}"
    if directory.exists():
        return directory
    if not may_install:
        raise PeerUnavailable("it is not installed yet; the full run installs it")
    partial = directory.with_name(f"partial-{directory.name}")
    shutil.rmtree(partial, ignore_errors=True)
    downloads = partial / "downloads"
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", downloads, f"vllm=={VLLM_VERSION}")
    (wheel,) = downloads.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if not name.endswith((".so", ".cubin"))])
    shutil.rmtree(downloads)
    _pip("install", "--no-deps", "--target", partial, *ALSO)
    partial.rename(directory)
    return directory


def _pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_INPUT": "1"})
    if done.returncode:
        raise PeerUnavailable(f"pip failed: {' '.join(done.stderr.split())[-300:]}")
