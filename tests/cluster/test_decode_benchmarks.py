"""The benchmarks of the schedulers and of drafting run through: their figures are for a quiet machine, that they work is for this one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT


def report_of(name: str, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["benchmark"] == name
    return report


def test_the_schedulers_are_measured_with_or_without_their_peer(tmp_path: Path) -> None:
    rows = report_of("scheduler", tmp_path)["rows"]
    assert [row["target"] for row in rows] == ["6"] * 3
    assert all(row["value"] > 0 for row in rows)
    assert all(row["met"] is False for row in rows[:2] if row["peer_value"] is None), "a peer that is not there is a missed row"


def test_drafting_gives_the_same_answers_in_fewer_steps(tmp_path: Path) -> None:
    rows = {row["what"]: row["value"] for row in report_of("speculation", tmp_path)["rows"]}
    assert rows["answers equal those of one process without drafts"] == "yes"
    assert rows["default: tokens a step"] > 2
