"""The engine benchmark runs through: small model, one repeat, transformers as the peer; llama.cpp where it is already built."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT


def test_a_quick_run_reports_every_kind_of_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["benchmark"] == "engine"
    assert {row["target"] for row in report["rows"]} == {"1", "2", "3"}
    by_transformers = [row for row in report["rows"] if str(row["peer"]).startswith("transformers")]
    assert len(by_transformers) == 1 + 3 * 2, "the check, and three cases in two modes"
    assert all(row["met"] for row in by_transformers), by_transformers
    assert "log-probabilities" in done.stdout
