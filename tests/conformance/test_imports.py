"""The folders are the architecture. Held twice: by the import linter over all modules, and by fresh interpreters.

The linter sees import statements but not what a parent's `__init__` drags in; the interpreters see that, but only what is
imported at start.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("kv_transfer", "glm_runtime", "prefill_worker", "decode_worker", "router", "cluster")
HEAVY = ("torch", "triton", "ray", "nixl", "numpy", "llguidance")
ROUTER_ENTRIES = ("router.gateway.__main__", "router.relay", "router.policy")
CONTRACT = (
    "identity",
    "errors",
    "layout",
    "grammar",
    "request_values",
    "worker_values",
    "messages",
    "block_keys",
    "handoff",
    "link",
    "wire",
    "directory",
    "config",
)
SUPERVISOR_ENTRIES = ("cluster.cli", "cluster.config_file", "cluster.supervisor", "cluster.cluster_status")


def _loaded_by(*modules: str) -> set[str]:
    """Top-level names in sys.modules after a fresh interpreter has imported these modules."""
    program = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_linter_contracts_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_gateway_starts_without_torch_ray_and_nixl() -> None:
    assert not _loaded_by(*ROUTER_ENTRIES) & set(HEAVY)


def test_the_supervisor_starts_without_torch_and_nixl() -> None:
    assert not _loaded_by(*SUPERVISOR_ENTRIES) & set(HEAVY)


@pytest.mark.parametrize("module", CONTRACT)
def test_contract_files_need_the_standard_library_and_msgspec_only(module: str) -> None:
    installed = _loaded_by(f"kv_transfer.{module}") - set(sys.stdlib_module_names)
    assert installed <= {"kv_transfer"} | _loaded_by("msgspec")


def test_a_planted_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import numpy\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import planted; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "True"


def _modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_package_files_hold_a_docstring_and_nothing_else() -> None:
    """Except an op's, which holds its dispatch."""
    for path in _modules():
        if path.name != "__init__.py" or "ops" in path.relative_to(ROOT).parts[:-2]:
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), f"{path} holds code"
        assert body, f"{path} has no docstring"


def test_one_file_imports_nixl() -> None:
    importers = [path.relative_to(ROOT).as_posix() for path in _modules() if any(name.split(".")[0] == "nixl" for name in _imported(path))]
    assert importers == ["kv_transfer/transports/nixl.py"]


def test_one_file_makes_ray_actors() -> None:
    makers = [path.relative_to(ROOT).as_posix() for path in _modules() if "ray.remote" in path.read_text(encoding="utf-8")]
    assert set(makers) <= {"cluster/actors.py"}


def test_kernels_are_reached_through_their_op_only() -> None:
    for path in _modules():
        inside_ops = "ops" in path.relative_to(ROOT).parts
        for name in _imported(path):
            assert inside_ops or not (".ops." in name and name.endswith((".triton", ".cpu", ".native", ".reference"))), (
                f"{path} imports {name}"
            )


def test_files_have_no_forbidden_names() -> None:
    names = {path.stem for path in _modules()}
    assert not names & {"utils", "helpers", "common", "misc"}
