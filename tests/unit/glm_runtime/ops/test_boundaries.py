"""An op's implementations are its own business: only its folder imports them."""

import ast
from pathlib import Path

import glm_runtime.ops

OPS = Path(glm_runtime.ops.__file__).parent
IMPLEMENTATIONS = {"reference", "cpu", "native", "triton"}


def test_nobody_imports_an_implementation_from_outside_its_folder() -> None:
    offenders = []
    for path in OPS.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            parts = module.split(".")
            if parts[:2] != ["glm_runtime", "ops"] or len(parts) < 3 or path.is_relative_to(OPS / parts[2]):
                continue
            if len(parts) > 3 or any(name.name in IMPLEMENTATIONS for name in node.names):
                offenders.append(f"{path.name}: {module}")
    assert not offenders
