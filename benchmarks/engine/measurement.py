"""Takes turns between running engines: the same tokens for all, fresh ones for every repeat, medians.

Knows: how one case is measured. Does not know which case has which goal, nor how an engine is started.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.engine.cases import CHECK_TOLERANCE, Case, Kind
from benchmarks.engine.engine_process import EngineFailed, EngineProcess

WARM_UP_STEPS = 3


@dataclass(kw_only=True, slots=True)
class CaseResult:
    """seconds: by engine's name, one median step (or one prefill) per repeat. failures: by engine's name. experts: see `our_engine.py`.

    bandwidths: bytes a second read by the same threads, one just before each repeat, where the case has a share of it as its goal.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    experts: float | None = None
    bandwidths: list[float] = field(default_factory=list)


def measure_case(
    case: Case, engines: Sequence[EngineProcess], vocab_size: int, seed: int, gauge: EngineProcess | None = None
) -> CaseResult:
    """Every engine in turn, `case.repeats` times. An engine that fails is left out from then on, and its failure noted.

    gauge: one of the engines, which measures the read bandwidth at the start of every repeat: it moves within minutes.
    """
    draw = _token_source(vocab_size, seed)
    result = CaseResult()
    active = list(engines)
    context = draw(case.context)

    def in_turn(act: Callable[[EngineProcess], object], among: Sequence[EngineProcess] = engines) -> None:
        for engine in [each for each in active if each in among]:
            try:
                act(engine)
            except EngineFailed as error:
                active.remove(engine)
                result.failures[engine.spec.name] = str(error)
                result.seconds.pop(engine.spec.name, None)

    if case.batch:
        in_turn(lambda engine: engine.fill(case.batch, context))
    warm_up = draw(case.batch * WARM_UP_STEPS) if case.batch else context
    in_turn(lambda engine: _time(case, engine, warm_up))
    for _ in range(case.repeats):
        in_turn(lambda engine: result.bandwidths.extend(engine.ask("bandwidth")), [gauge] if gauge is not None else [])
        fresh = draw(case.batch * (max(case.steps_of(engine.spec.system) for engine in engines) + 1) if case.batch else case.context)
        in_turn(lambda engine, fresh=fresh: result.seconds.setdefault(engine.spec.name, []).append(_time(case, engine, fresh)))  # type: ignore[misc]
    return result


def count_experts(case: Case, engine: EngineProcess, vocab_size: int, seed: int) -> float:
    """Distinct experts a MoE layer needs in a step of the case: on the context that the engine has filled, with fresh tokens."""
    (mean,) = engine.ask("experts", _token_source(vocab_size, seed + 1)(case.batch * case.steps_of(engine.spec.system)))
    return mean


def compare_log_probs(ours: EngineProcess, peer: EngineProcess, prompts: Sequence[Sequence[int]]) -> float:
    """Largest difference of any token's log-probability after any of the prompts."""
    return max(
        abs(left - right)
        for prompt in prompts
        for left, right in zip(ours.log_probs(prompt), peer.log_probs(prompt), strict=True)
    )  # fmt: skip


def is_equal_enough(difference: float) -> bool:
    """Whether an engine computes the same model; not when the difference is no number."""
    return difference <= CHECK_TOLERANCE


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """One prompt of each length."""
    draw = _token_source(vocab_size, seed)
    return [draw(length) for length in lengths]


def quickest(seconds: Mapping[str, Sequence[float]]) -> str:
    """The name with the smallest median."""
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def choose_variants(
    variants: Mapping[str, Sequence[str]], pilots: Mapping[Kind, CaseResult], finished: Sequence[tuple[Kind, CaseResult]]
) -> dict[tuple[str, Kind], str]:
    """By peer and kind of case, the engine's name. variants: names by peer. finished: cases that an earlier run has measured.

    What a finished case was measured with stays chosen for its kind, even where a pilot that was measured again would choose another:
    else its row would ask for an engine that the case never saw.
    """
    chosen: dict[tuple[str, Kind], str] = {}
    for kind, result in [*pilots.items(), *finished]:
        for peer, names in variants.items():
            if seconds := {name: result.seconds[name] for name in names if name in result.seconds}:
                chosen[peer, kind] = quickest(seconds)
    return chosen


class Progress:
    """One line per finished piece of work on stderr, with the time it took, the time so far and what all is expected to take."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._started_s = self._lap_s = time.monotonic()

    def skip(self, what: str, expected_s: float) -> None:
        """A piece that an earlier run has done."""
        self._expected_s -= expected_s
        self._print(f"{what}: taken from the earlier run")

    def done(self, what: str) -> None:
        """A piece that was done since the last call."""
        now_s = time.monotonic()
        lap_s, self._lap_s = now_s - self._lap_s, now_s
        self._print(f"{what} [{lap_s:.1f} s]")

    def _print(self, what: str) -> None:
        print(f"{_clock(time.monotonic() - self._started_s)} of about {_clock(self._expected_s)}  {what}", file=sys.stderr, flush=True)


def _time(case: Case, engine: EngineProcess, tokens: Sequence[int]) -> float:
    if not case.batch:
        return engine.prefill(tokens)
    # One step more than is kept: `generate` does not time its first.
    num_steps = min(case.steps_of(engine.spec.system) + 1, len(tokens) // case.batch)
    return statistics.median(engine.decode(tokens[: num_steps * case.batch])[-case.steps_of(engine.spec.system) :])


def _token_source(vocab_size: int, seed: int) -> Callable[[int], list[int]]:
    generator = random.Random(seed)
    return lambda count: [generator.randrange(vocab_size) for _ in range(count)]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
