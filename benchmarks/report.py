"""What every benchmark reports: rows with a goal, printed as a table and written as one JSON object. The table is made from the rows."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured number. `target` is the number of the goal it belongs to; a peer that could not be built is a missed row."""

    target: str
    what: str
    value: float | str
    unit: str
    goal: str
    met: bool
    peer: str | None = None
    peer_value: float | None = None
    repeats: int = 1


def run_benchmark(name: str, measure: Callable[[bool], Sequence[Row]], arguments: Sequence[str] | None = None) -> int:
    """Parse --quick and --json, measure, report. Returns 0 also for a missed goal: the row says so."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args(arguments)
    rows = measure(options.quick)
    report = {"benchmark": name, "commit": read_commit(), "machine": describe_machine(), "rows": [asdict(row) for row in rows]}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(render_rows(rows))
    return 0


def render_rows(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    header = ("target", "what", "value", "unit", "goal", "met", "peer", "peer value", "repeats")
    cells = [header, *(tuple(_show(value) for value in asdict(row).values()) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def read_commit() -> str:
    """The commit that is measured, with a mark when the tree has changes; "unknown" outside a repository."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def describe_machine() -> str:
    """Processor, cores and system of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def _show(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "MISSED"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
