"""Finished measurements on disk, so that `--resume` goes on where a run was interrupted."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.measurement import CaseResult


class SavedResults:
    """One JSON file, written anew after each measurement. It belongs to one commit and one kind of run: `key`."""

    def __init__(self, path: Path, key: str, *, is_resumed: bool) -> None:
        self._path = path
        self._content: dict[str, Any] = {"key": key, "cases": {}, "facts": {}}
        if is_resumed and path.exists():
            content = json.loads(path.read_text())
            if content["key"] == key:
                self._content = content

    def case(self, name: str) -> CaseResult | None:
        """What was measured for a case, if it was."""
        saved = self._content["cases"].get(name)
        return CaseResult(**saved) if saved is not None else None

    def add_case(self, name: str, result: CaseResult) -> None:
        """Keep a case's result."""
        self._content["cases"][name] = asdict(result)
        self._write()

    def fact(self, name: str) -> Any:
        """Something else that was found out, or None."""
        return self._content["facts"].get(name)

    def add_fact(self, name: str, value: Any) -> None:
        """Keep something that JSON can hold."""
        self._content["facts"][name] = value
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1))
        partial.rename(self._path)
