"""The command line of this benchmark, and its rows."""

import asyncio
from collections.abc import Sequence

from benchmarks.report import Row, run_benchmark
from benchmarks.speculation.measurement import Setting, Speed, compare
from cluster.config import SHIPPED_CHECKPOINT
from glm_runtime.runtime_config import RuntimeConfig

TARGET = "4"
GOAL = 2.0
OFF = Setting(name="off", max_drafts=0, adapts_drafts=False)
_DEFAULTS = RuntimeConfig(checkpoint=SHIPPED_CHECKPOINT)
DEFAULT = Setting(name="default", max_drafts=_DEFAULTS.max_drafts, adapts_drafts=_DEFAULTS.adapts_drafts)
FIXED = tuple(Setting(name=f"{count} drafts", max_drafts=count, adapts_drafts=False) for count in (5, 8))
NUM_PROMPTS = 24
REPEATS = 7


def measure(quick: bool) -> list[Row]:
    """Off and on in turns; with --quick the default setting and few prompts."""
    settings = (OFF, DEFAULT) if quick else (OFF, DEFAULT, *FIXED)
    repeats = 2 if quick else REPEATS
    speeds = asyncio.run(compare(settings, num_prompts=4 if quick else NUM_PROMPTS, repeats=repeats))
    off = speeds.pop(OFF.name)
    rows = [_row("answers equal those of one process without drafts", "yes", "-", repeats)]
    rows += [_row(f"{OFF.name}: tokens/s after the first", off.rest_tokens_per_s, "tokens/s", repeats)]
    for name, speed in speeds.items():
        rows += _rows_of(name, speed, off, repeats)
    return rows


def _rows_of(name: str, speed: Speed, off: Speed, repeats: int) -> list[Row]:
    ratio = speed.rest_tokens_per_s / off.rest_tokens_per_s
    is_default = name == DEFAULT.name
    shares = " ".join(f"{held / max(made, 1):.2f}" for held, made in zip(speed.accepted, speed.drafted, strict=True))
    return [
        Row(
            target=TARGET, what=f"{name}: tokens/s after the first, against off", value=ratio, unit="x",
            goal=f">= {GOAL:g}" if is_default else "-", met=ratio >= GOAL or not is_default,
            peer="off", peer_value=off.rest_tokens_per_s, repeats=repeats,
        ),
        _row(f"{name}: tokens/s from the question on, against off", speed.tokens_per_s / off.tokens_per_s, "x", repeats),
        _row(f"{name}: tokens a step", speed.tokens_per_step, "-", repeats),
        _row(f"{name}: drafts that held, by position", shares, "-", repeats),
    ]  # fmt: skip


def _row(what: str, value: float | str, unit: str, repeats: int) -> Row:
    return Row(target=TARGET, what=what, value=value, unit=unit, goal="-", met=True, repeats=repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_benchmark("speculation", measure, arguments)
