"""The one build of the compiled kernels, and what happens where it cannot be had."""

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from glm_runtime.native import build
from glm_runtime.native.build import BuildFailed, are_kernels_expected, build_library

pytestmark = pytest.mark.skipif(not are_kernels_expected("auto"), reason="no compiler or no AVX-512: nothing is compiled here")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "src"
    directory.mkdir()
    (directory / "one.hpp").write_text("inline int one() { return 1; }\n")
    (directory / "one.cpp").write_text('#include "one.hpp"\nextern "C" int first() { return one(); }\n')
    (directory / "two.cpp").write_text('extern "C" int second() { return 2; }\n')
    return directory


def test_sources_are_compiled_once_and_again_when_they_change(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=build.__name__)
    first = build_library(tmp_path, sources)
    assert build_library(tmp_path, sources) == first
    assert caplog.text.count("kernels compiled") == 1
    (sources / "one.hpp").write_text("inline int one() { return 3; }\n")
    assert build_library(tmp_path, sources) != first, "a changed header is a changed source"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".o"]


def test_two_processes_at_once_compile_once(sources: Path, tmp_path: Path) -> None:
    program = (
        "import logging, sys; from pathlib import Path; logging.basicConfig(level=logging.INFO)\n"
        "from glm_runtime.native.build import build_library\n"
        "print(build_library(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(sources)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert results[0][0] == results[1][0] != ""
    assert sum("kernels compiled" in errors for _, errors in results) == 1


def test_a_broken_source_is_named(sources: Path, tmp_path: Path) -> None:
    (sources / "two.cpp").write_text("int second( {\n")
    with pytest.raises(BuildFailed, match=r"compiling .*two\.cpp failed with status 1: .*error"):
        build_library(tmp_path, sources)
    assert not list(tmp_path.glob("*.so")), "a failed build leaves nothing behind that a later one would take"


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not are_kernels_expected("native")
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler was found \(tried g\+\+, .*apt-get install g\+\+"):
        build_library(tmp_path, sources)


def test_a_place_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildFailed, match=r"cannot write compiled kernels to .*make the directory writable"):
        build_library(tmp_path / "file" / "cache", sources)


def choose_kernels_in(choice: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`choose_kernels` in a new process."""
    program = "import sys; from glm_runtime.native.library import choose_kernels; print(choose_kernels(sys.argv[1]))"
    return subprocess.run(
        [sys.executable, "-c", program, choice], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def choose_without_compiler(choice: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """On a machine without compiler."""
    return choose_kernels_in(choice, {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})


def test_auto_falls_back_to_torch_with_a_warning(tmp_path: Path) -> None:
    done = choose_without_compiler("auto", tmp_path)
    assert done.stdout == "False\n"
    assert "compiled kernels unavailable, torch serves more slowly reason=no C++ compiler was found" in done.stderr


def test_native_insists_and_names_its_field(tmp_path: Path) -> None:
    done = choose_without_compiler("native", tmp_path)
    assert "ConfigError: runtime.kernels" in done.stderr
    assert "is 'native', but no C++ compiler was found" in done.stderr


@pytest.mark.parametrize("choice", ["auto", "native"])
def test_a_library_that_cannot_be_loaded_is_as_good_as_none(tmp_path: Path, choice: str) -> None:
    broken = tmp_path / "glm-cluster" / build_library().name
    broken.parent.mkdir()
    broken.write_text("no library")
    done = choose_kernels_in(choice, {"XDG_CACHE_HOME": str(tmp_path)})
    if choice == "auto":
        assert done.stdout == "False\n"
        assert f"compiled kernels unavailable, torch serves more slowly reason={broken} cannot be loaded" in done.stderr
    else:
        assert f"is 'native', but {broken} cannot be loaded" in done.stderr
        assert "remove it" in done.stderr


def test_a_library_in_a_cache_that_cannot_be_written_is_used(sources: Path, tmp_path: Path) -> None:
    built = build_library(tmp_path, sources)
    lock = built.with_name(f"{built.name}.lock")
    lock.unlink()
    lock.mkdir()  # nobody can open it for writing, root neither
    assert build_library(tmp_path, sources) == built


COMPILER = """#!/bin/sh
case "$*" in
  *one.cpp*) while [ ! -e "{place}/pid" ]; do sleep 0.05; done; echo 'one.cpp: this is no C++' >&2; {then}; exit 1 ;;
  *two.cpp*) sleep 60 & echo $! > "{place}/pid.new"; mv "{place}/pid.new" "{place}/pid"; wait ;;
esac
"""


@pytest.mark.parametrize("then", ["true", 'rm -r "{place}"/cache/tmp*'])
def test_the_first_failure_is_told_at_once_and_ends_the_other_compilers(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER.format(place=tmp_path, then=then.format(place=tmp_path)))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BuildFailed, match=r"compiling .*one\.cpp failed with status 1: one\.cpp: this is no C\+\+"):
        build_library(tmp_path / "cache", sources)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    until_s = time.monotonic() + 2.0  # it is told to end and is nobody's here to wait for: the kernel takes its moment
    while state.exists() and state.read_text().split()[2] not in "ZX" and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z", "the other compiler's own child still runs"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_compiler_that_cannot_start_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/no/such/shell\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BuildFailed, match=r"g\+\+ cannot be started: "):
        build_library(tmp_path / "cache", sources)


def test_old_libraries_go_when_a_new_one_comes(sources: Path, tmp_path: Path) -> None:
    long_ago_s = time.time() - 31 * 86400
    kept = ("kernels-new.so", "kernels-new.so.lock", "kernels-read.so", "others.so")
    for name in (*kept, "kernels-old.so", "kernels-old.so.lock"):
        (tmp_path / name).write_text("")
    for name in ("kernels-old.so", "kernels-old.so.lock", "kernels-read.so", "others.so"):
        os.utime(tmp_path / name, (long_ago_s, long_ago_s))
    os.utime(tmp_path / "kernels-read.so", (time.time(), long_ago_s))
    built = build_library(tmp_path, sources)
    assert {path.name for path in tmp_path.iterdir() if path != sources} == {*kept, built.name, f"{built.name}.lock"}
    os.utime(built, (long_ago_s, long_ago_s))
    assert build_library(tmp_path, sources) == built
    assert built.stat().st_atime > long_ago_s + 86400, "each use is noted, whatever the file system is mounted with"


def test_without_a_home_the_directory_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = build._private_directory()
    assert own == build._private_directory() == tmp_path / f"glm-cluster-{os.getuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    other = build._private_directory()
    assert other != own, "a directory that others can write to may hold anything"
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    own.rmdir()
    own.symlink_to(other)
    assert build._private_directory() not in (own, other), "a link is somebody's choice"


def test_a_compiler_that_is_too_old_is_told_apart_from_the_processor(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++") or shutil.which("c++")} "$@" -mno-avx512bf16\n')
    compiler.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    done = choose_kernels_in("auto", environment)
    assert done.stdout == "False\n", done.stderr
    assert "this processor has it, but the compiler is too old" in done.stderr
