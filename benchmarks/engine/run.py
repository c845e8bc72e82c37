"""One run of the benchmark: set up, check that all engines compute the same, choose each peer's best variant, measure, report."""

import importlib.util
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.cached_setup import LlamaBuild, PeerUnavailable, built_llama, cache_dir, llama_model, random_checkpoint
from benchmarks.engine.cases import FULL_CASES, LLAMA_CPP, OURS, PILOT_CASES, QUICK_CASES, TRANSFORMERS, Case, Kind, check_lengths
from benchmarks.engine.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.engine.measurement import (
    CaseResult,
    Progress,
    choose_variants,
    compare_log_probs,
    count_experts,
    is_equal_enough,
    measure_case,
    random_prompts,
)
from benchmarks.engine.report_rows import RunFacts, case_rows, check_rows, roofline_rows
from benchmarks.engine.roofline import StepBytes, step_bytes
from benchmarks.engine.saved_results import SavedResults
from benchmarks.report import Row, read_commit
from glm_runtime.cache_format import SERVING_DEVICE, choose_cache_formats
from glm_runtime.config import GlmConfig
from glm_runtime.row_format import make_row_format
from glm_runtime.runtime_config import CacheFormatChoice, RuntimeConfig

NUM_THREADS = 2
TIMEOUT_S = 600.0
MODES = ("fast", "deterministic")
GOAL_MODE = "fast"
"""What a user would choose who wants speed; the deterministic mode's rows stand beside it without a goal."""
CACHE_FORMAT: CacheFormatChoice = "bf16"
PEERS = (TRANSFORMERS, LLAMA_CPP)
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
LLAMA_VARIANTS = (("bf16", "f16"), ("bf16", "bf16"), ("f16", "f16"))
"""Types of the weights and of the cache."""
SPARE_TOKENS = 64
CHECK_S, PILOT_S = 60.0, 60.0
"""What these two are expected to take in a full run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What this run is about. variants: by system, what may be measured; checked: by system, the fp32 engine that is compared."""

    checkpoint: Path
    config: GlmConfig
    cases: Sequence[Case]
    variants: Mapping[str, Sequence[EngineSpec]]
    checked: Mapping[str, EngineSpec]
    missing: Mapping[str, str]
    is_quick: bool


def measure(quick: bool, *, is_resumed: bool = False) -> list[Row]:
    """The rows of targets 1 to 3."""
    plan = make_plan(quick)
    saved = SavedResults(cache_dir() / f"results-{'quick' if quick else 'full'}.json", read_commit(), is_resumed=is_resumed)
    progress = Progress((0.0 if quick else CHECK_S + PILOT_S) + sum(case.expected_s for case in plan.cases))
    missing = dict(plan.missing)
    differences = _check(plan, saved, missing, progress)
    chosen = _only_variants(plan) if quick else _choose(plan, saved, missing, progress)
    chosen_specs = {
        system: [spec for spec in specs if system == OURS or spec.name in chosen.values()] for system, specs in plan.variants.items()
    }
    with _running(chosen_specs, missing) as engines:
        results = _measure_cases(plan, saved, engines, chosen, progress)
    facts = RunFacts(
        modes={spec.variant.split(",")[0]: spec.name for spec in plan.variants[OURS]},
        goal_mode=GOAL_MODE, chosen=chosen, differences=differences, missing=missing, has_goals=not quick,
    )  # fmt: skip
    rows = check_rows(PEERS, facts)
    for case in plan.cases:
        rows += case_rows(case, results[case.name], facts)
        if case.has_roofline_goal:
            rows += roofline_rows(case, results[case.name], facts, _step_bytes(plan, case, results[case.name].experts or 0.0))
    return rows


def make_plan(quick: bool) -> Plan:
    """Make or find the model and the peers. A peer that cannot be had is noted as missing."""
    cases = QUICK_CASES if quick else FULL_CASES
    checkpoint = random_checkpoint("small" if quick else "medium")
    pool_tokens = max((case.context + SPARE_TOKENS * 2) * max(case.batch, 1) for case in [*cases, *PILOT_CASES.values()])
    variants: dict[str, Sequence[EngineSpec]] = {OURS: [our_spec(checkpoint, mode, CACHE_FORMAT, pool_tokens) for mode in MODES]}
    checked = {OURS: our_spec(checkpoint, "deterministic", "fp32", pool_tokens)}
    missing: dict[str, str] = {}
    if importlib.util.find_spec("transformers") is None:
        missing[TRANSFORMERS] = "not installed; pip install -e '.[bench]'"
    else:
        implementations = EXPERTS_IMPLEMENTATIONS[:1] if quick else EXPERTS_IMPLEMENTATIONS
        variants[TRANSFORMERS] = [transformers_spec(checkpoint, "bfloat16", experts) for experts in implementations]
        checked[TRANSFORMERS] = transformers_spec(checkpoint, "float32", "eager")
    try:
        build = built_llama(may_build=not quick)
        variants[LLAMA_CPP] = [llama_spec(build, checkpoint, weights, cache) for weights, cache in LLAMA_VARIANTS[: 1 if quick else None]]
        checked[LLAMA_CPP] = llama_spec(build, checkpoint, "f32", "f32")
    except PeerUnavailable as error:
        missing[LLAMA_CPP] = str(error)
    config = GlmConfig.from_checkpoint(checkpoint)
    return Plan(
        checkpoint=checkpoint, config=config, cases=cases, variants=variants, checked=checked, missing=missing, is_quick=quick
    )  # fmt: skip


def our_spec(checkpoint: Path, mode: str, cache_format: str, pool_tokens: int) -> EngineSpec:
    """This project's engine."""
    words = (str(checkpoint), mode, cache_format, str(pool_tokens), str(NUM_THREADS))
    command = (sys.executable, "-m", "benchmarks.engine.our_engine", *words)
    return EngineSpec(system=OURS, variant=f"{mode}, {cache_format} cache", command=command)


def transformers_spec(checkpoint: Path, dtype: str, experts: str) -> EngineSpec:
    """transformers' `generate`."""
    command = (sys.executable, "-m", "benchmarks.engine.transformers_engine", str(checkpoint), dtype, experts, str(NUM_THREADS))
    return EngineSpec(system=TRANSFORMERS, variant=f"{dtype}, {experts} experts", command=command)


def llama_spec(build: LlamaBuild, checkpoint: Path, weights: str, cache: str) -> EngineSpec:
    """llama.cpp through our driver. Raises PeerUnavailable when the model cannot be converted."""
    command = (str(build.driver), str(llama_model(build, checkpoint, weights)), cache, str(NUM_THREADS))
    return EngineSpec(system=LLAMA_CPP, variant=f"{weights} weights, {cache} cache", command=command)


def _start(spec: EngineSpec) -> EngineProcess:
    return EngineProcess(spec, cache_dir(), num_threads=NUM_THREADS, timeout_s=TIMEOUT_S)


@contextmanager
def _running(specs: Mapping[str, Sequence[EngineSpec]], missing: dict[str, str]) -> Iterator[list[EngineProcess]]:
    """The engines of these specifications; a peer that does not start is noted as missing."""
    with ExitStack() as stack:
        engines = []
        for spec in (spec for of_system in specs.values() for spec in of_system):
            try:
                engines.append(stack.enter_context(_start(spec)))
            except EngineFailed as error:
                if spec.system == OURS:
                    raise
                missing[spec.system] = str(error)
        yield [engine for engine in engines if engine.spec.system not in missing]


def _check(plan: Plan, saved: SavedResults, missing: dict[str, str], progress: Progress) -> dict[str, float]:
    """Compare log-probabilities with every peer, before anything is timed."""
    differences: dict[str, float] = saved.fact("differences") or {}
    peers = [peer for peer in plan.checked if peer != OURS and peer not in differences]
    if not peers:
        progress.skip("check of the results", 0.0 if plan.is_quick else CHECK_S)
        return differences
    prompts = random_prompts(check_lengths(plan.config.index_topk), plan.config.vocab_size, seed=1)
    with _start(plan.checked[OURS]) as ours:
        for peer in peers:
            try:
                with _start(plan.checked[peer]) as engine:
                    differences[peer] = compare_log_probs(ours, engine, prompts)
            except EngineFailed as error:
                if error.system == OURS:
                    raise
                missing[peer] = str(error)
                progress.done(f"check against {peer}: {error}")
                continue
            verdict = "equal enough" if is_equal_enough(differences[peer]) else "DIFFERENT: its rows are missed"
            progress.done(f"check against {peer}: log-probabilities differ by at most {differences[peer]:.2g}, {verdict}")
    saved.add_fact("differences", differences)
    return differences


def _only_variants(plan: Plan) -> dict[tuple[str, Kind], str]:
    """The first variant of each peer for everything."""
    return {(peer, kind): specs[0].name for peer, specs in plan.variants.items() if peer != OURS for kind in Kind}


def _choose(plan: Plan, saved: SavedResults, missing: dict[str, str], progress: Progress) -> dict[tuple[str, Kind], str]:
    """The quickest variant of each peer for each kind of case, by a short measurement; for a kind with finished cases what they have."""
    if wanted := [kind for kind in PILOT_CASES if saved.case(_pilot_name(kind)) is None]:
        with _running({peer: specs for peer, specs in plan.variants.items() if peer != OURS}, missing) as engines:
            for kind in wanted:
                result = measure_case(PILOT_CASES[kind], engines, plan.config.vocab_size, seed=2)
                saved.add_case(_pilot_name(kind), result)
                progress.done(f"{_pilot_name(kind)} (tokens/s): {_speeds(PILOT_CASES[kind], result)}")
    else:
        progress.skip("choice of variants", PILOT_S)
    variants = {peer: [spec.name for spec in specs] for peer, specs in plan.variants.items() if peer != OURS}
    pilots = {kind: saved.case(_pilot_name(kind)) or CaseResult() for kind in PILOT_CASES}
    finished = [(case.kind, measured) for case in plan.cases if (measured := saved.case(case.name)) is not None]
    return choose_variants(variants, pilots, finished)


def _pilot_name(kind: Kind) -> str:
    return f"choice of variants, {kind.value}"


def _measure_cases(
    plan: Plan, saved: SavedResults, engines: Sequence[EngineProcess], chosen: Mapping[tuple[str, Kind], str], progress: Progress
) -> dict[str, CaseResult]:
    results = {}
    goal_engine = next(engine for engine in engines if engine.spec.system == OURS and engine.spec.variant.startswith(GOAL_MODE))
    for number, case in enumerate(plan.cases):
        if (result := saved.case(case.name)) is None:
            wanted = {chosen.get((peer, case.kind)) for peer in case.peers}
            taking_part = [engine for engine in engines if engine.spec.system == OURS or engine.spec.name in wanted]
            gauge = goal_engine if case.has_roofline_goal else None
            result = measure_case(case, taking_part, plan.config.vocab_size, seed=10 + number, gauge=gauge)
            if case.has_roofline_goal and goal_engine.spec.name in result.seconds:
                result.experts = count_experts(case, goal_engine, plan.config.vocab_size, seed=10 + number)
            saved.add_case(case.name, result)
            progress.done(f"{case.name} (tokens/s): {_speeds(case, result)}")
        else:
            progress.skip(case.name, case.expected_s)
        results[case.name] = result
    return results


def _speeds(case: Case, result: CaseResult) -> str:
    speeds = [f"{name} {case.tokens_per_call / statistics.median(seconds):.3g}" for name, seconds in result.seconds.items()]
    return ", ".join([*speeds, *(f"{name} FAILED" for name in result.failures)])


def _step_bytes(plan: Plan, case: Case, experts_hit: float) -> StepBytes:
    formats = choose_cache_formats(RuntimeConfig(checkpoint=plan.checkpoint, cache_format=CACHE_FORMAT), plan.config, SERVING_DEVICE)
    return step_bytes(
        plan.config,
        batch=case.batch,
        context=case.context,
        experts_hit=experts_hit,
        mla_row_bytes=make_row_format(formats.main_kind, plan.config.latent_dim).bytes_per_token,
        index_row_bytes=make_row_format(formats.index_kind, plan.config.index_head_dim).bytes_per_token,
    )
