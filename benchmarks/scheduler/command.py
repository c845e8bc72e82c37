"""The command line of this benchmark, and its rows."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.engine.cached_setup import PeerUnavailable
from benchmarks.engine.engine_process import EngineFailed
from benchmarks.report import Row, run_benchmark
from benchmarks.scheduler.measurement import decode_steps, prefill_steps
from benchmarks.scheduler.vllm_peer import VllmPeer, start_vllm

TARGET = "6"
PEER = "vLLM V1 scheduler"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """goal_us: of a step. per: what the row divides a step by."""

    what: str
    num_requests: int
    has_drafts: bool
    goal_us: float
    per: int


CASES = (
    Case(what="256 requests of 8K, no drafts: per request and step", num_requests=256, has_drafts=False, goal_us=512.0, per=256),
    Case(what="32 requests of 8K x 6 rows: per step", num_requests=32, has_drafts=True, goal_us=60.0, per=1),
)
NUM_PREFILLS = 16
WINDOW_STEPS = 48
"""Steps are averaged over so many, since not each of them does all that has to be done, and the median taken of that."""


def measure(quick: bool) -> list[Row]:
    """Ours and vLLM's in turns; each repeat is a worker of its own."""
    repeats, num_steps = (1, 96) if quick else (7, 288)
    with start_vllm(may_install=not quick) as vllm:
        rows = [_measure_case(case, vllm, repeats, num_steps) for case in CASES]
    seconds = [median(prefill_steps(NUM_PREFILLS, num_steps=10)) for _ in range(repeats)]
    rows.append(
        Row(
            target=TARGET, what=f"prefill, {NUM_PREFILLS} prompts of 8K in chunks of 512: per step", value=1e6 * median(seconds),
            unit="us", goal="-", met=True, repeats=repeats,
        )
    )  # fmt: skip
    return rows


def _measure_case(case: Case, vllm: VllmPeer | PeerUnavailable, repeats: int, num_steps: int) -> Row:
    ours: list[float] = []
    theirs: list[float] = []
    peer = PEER
    for _ in range(repeats):
        ours.append(_step_us(case, lambda: decode_steps(case.num_requests, has_drafts=case.has_drafts, num_steps=num_steps)))
        try:
            if isinstance(vllm, PeerUnavailable):
                raise vllm
            theirs.append(_step_us(case, lambda: vllm.steps(case.num_requests, case.has_drafts, num_steps)))
        except (PeerUnavailable, EngineFailed) as error:
            peer = f"{PEER}: not measured ({error})"
            print(peer, file=sys.stderr)
    return Row(
        target=TARGET,
        what=case.what,
        value=median(ours),
        unit="us",
        goal=f"<= {case.goal_us / case.per:g}",
        met=median(ours) <= case.goal_us / case.per and len(theirs) == len(ours),
        peer=peer,
        peer_value=median(theirs) if theirs else None,
        repeats=repeats,
    )


def _step_us(case: Case, steps: Callable[[], Sequence[float]]) -> float:
    seconds = steps()
    means = [mean(seconds[start : start + WINDOW_STEPS]) for start in range(0, len(seconds), WINDOW_STEPS)]
    return 1e6 * median(means) / case.per


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_benchmark("scheduler", measure, arguments)
