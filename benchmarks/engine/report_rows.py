"""Rows of the report from what was measured: ratios to each peer, the roofline's share. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.engine.cases import CHECK_TOLERANCE, Case, Kind
from benchmarks.engine.measurement import CaseResult, is_equal_enough
from benchmarks.engine.roofline import StepBytes, bandwidth_share_percent
from benchmarks.report import Row

ROOFLINE_GOAL_PERCENT = 50.0
REASON_CHARACTERS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What holds for all cases. modes: our engines' names, by mode; goals count for `goal_mode`. differences: of log-probabilities,
    by peer. missing: why a peer is not there. has_goals: not when the run is only to see that it works."""

    modes: Mapping[str, str]
    goal_mode: str
    chosen: Mapping[tuple[str, Kind], str]
    differences: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    has_goals: bool = True

    def is_checked(self, peer: str) -> bool:
        """Whether the peer computes what we compute."""
        return is_equal_enough(self.differences.get(peer, float("nan")))


def check_rows(peers: Sequence[str], facts: RunFacts) -> list[Row]:
    """One row per peer: did it compute the same model."""
    rows = []
    for peer in peers:
        value = facts.differences.get(peer, _brief(facts.missing.get(peer, "not compared")))
        rows.append(
            Row(
                target="1", what=f"first-token log-probabilities against {peer}, fp32: largest difference", value=value, unit="nats",
                goal=f"<= {CHECK_TOLERANCE:g}", met=facts.is_checked(peer), peer=peer,
            )
        )  # fmt: skip
    return rows


def case_rows(case: Case, result: CaseResult, facts: RunFacts) -> list[Row]:
    """Our speed in each mode, against each peer of the case."""
    rows = []
    for mode, engine in facts.modes.items():
        seconds = result.seconds.get(engine)
        if seconds is None:
            reason = result.failures.get(engine, "not measured")
            rows.append(Row(target=_target(case), what=f"{case.name}, {mode}", value=_brief(reason), unit="-", goal="measured", met=False))
            continue
        speed = case.tokens_per_call / statistics.median(seconds)
        rows.append(
            Row(
                target=_target(case), what=f"{case.name}, {mode}", value=speed, unit="tokens/s", goal="-", met=True, repeats=len(seconds)
            )
        )  # fmt: skip
        rows += [_ratio_row(case, result, facts, mode, speed, peer) for peer in case.peers]
    return rows


def roofline_rows(case: Case, result: CaseResult, facts: RunFacts, read: StepBytes) -> list[Row]:
    """The share of the memory's bandwidth that each mode's steps make of what they must read: median step, median bandwidth beside it."""
    rows = []
    for mode, engine in facts.modes.items():
        if engine not in result.seconds or result.experts is None or not result.bandwidths:
            reason = result.failures.get(engine, "not measured")
            rows.append(Row(target="3", what=f"{case.name}, {mode}", value=_brief(reason), unit="-", goal="measured", met=False))
            continue
        step_s, bandwidth = statistics.median(result.seconds[engine]), statistics.median(result.bandwidths)
        share = bandwidth_share_percent(read, step_s, bandwidth)
        is_goal = facts.has_goals and mode == facts.goal_mode
        rows.append(
            Row(
                target="3",
                what=f"{case.name}, {mode}: {read.weights / 1e6:.0f} MB of weights ({result.experts:.1f} experts a layer) and "
                f"{read.cache / 1e6:.1f} MB of cache in {step_s * 1e3:.1f} ms, beside {_range(result.bandwidths)} GB/s",
                value=share, unit="% of read bandwidth", goal=f">= {ROOFLINE_GOAL_PERCENT:g}" if is_goal else "-",
                met=share >= ROOFLINE_GOAL_PERCENT or not is_goal, peer="GB/s read by the same threads, median",
                peer_value=bandwidth / 1e9, repeats=len(result.seconds[engine]),
            )
        )  # fmt: skip
    return rows


def _ratio_row(case: Case, result: CaseResult, facts: RunFacts, mode: str, speed: float, peer: str) -> Row:
    wanted = case.goals.get(peer) if facts.has_goals and mode == facts.goal_mode else None
    goal = f">= {wanted:g}" if wanted is not None else "-"
    what = f"  {case.name}, {mode} / {peer}"
    engine = facts.chosen.get((peer, case.kind), "")
    if engine not in result.seconds:
        reason = facts.missing.get(peer) or result.failures.get(engine) or "not measured"
        return Row(target=_target(case), what=what, value=_brief(reason), unit="-", goal=goal, met=False, peer=peer)
    peer_speed = case.tokens_per_call / statistics.median(result.seconds[engine])
    ratio = speed / peer_speed
    is_met = facts.is_checked(peer) and (wanted is None or ratio >= wanted)
    return Row(
        target=_target(case), what=what, value=ratio, unit="x", goal=goal, met=is_met, peer=engine, peer_value=peer_speed,
        repeats=len(result.seconds[engine]),
    )  # fmt: skip


def _range(bandwidths: Sequence[float]) -> str:
    return f"{min(bandwidths) / 1e9:.0f} to {max(bandwidths) / 1e9:.0f}"


def _brief(reason: str) -> str:
    """What a table's cell holds of a reason; all of it was printed when it happened."""
    return reason if len(reason) <= REASON_CHARACTERS else reason[: REASON_CHARACTERS - 3] + "..."


def _target(case: Case) -> str:
    return "2" if case.kind is Kind.PREFILL else "1"
