"""The engine benchmark's arithmetic, its rows, and its way with engines that fail; engines here are toys in real processes."""

import sys
from pathlib import Path

import pytest

from benchmarks.engine.cases import FULL_CASES, LLAMA_CPP, OURS, TRANSFORMERS, Case, Kind
from benchmarks.engine.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.engine.measurement import CaseResult, choose_variants, compare_log_probs, is_equal_enough, measure_case
from benchmarks.engine.report_rows import RunFacts, case_rows, check_rows, roofline_rows
from benchmarks.engine.roofline import StepBytes, bandwidth_share_percent, step_bytes
from benchmarks.engine.saved_results import SavedResults
from glm_runtime.config import GlmConfig
from glm_runtime.synthetic_config import model_fields
from tests.glm_checkpoints import write_config

PROGRAM = """
import sys
from benchmarks.engine.command_loop import serve

class Toy:
    def log_probs(self, tokens): return [-1.0 * len(tokens), float(sys.argv[1])]
    def prefill(self, tokens): return 0.001 * len(tokens)
    def fill(self, batch, tokens): print("noise of a library")
    def decode(self, steps):
        if sys.argv[2] == "fails" : raise RuntimeError("out of luck")
        if sys.argv[2] == "ends": sys.exit(3)
        return [float(sys.argv[1]) * sum(map(len, steps)) / len(steps)] * len(steps)

serve(Toy, lambda engine, command, numbers: [5e9])
"""
DECODE = Case(context=16, batch=4, repeats=3, goals={LLAMA_CPP: 2.0, TRANSFORMERS: 3.0})
MODES = {"fast": "ours (fast)", "deterministic": "ours (deterministic)"}
CHOSEN = {(LLAMA_CPP, Kind.DECODE_MANY): "llama.cpp (a)", (TRANSFORMERS, Kind.DECODE_MANY): "transformers (b)"}
EQUAL = {LLAMA_CPP: 0.01, TRANSFORMERS: 0.0}


@pytest.fixture
def medium(tmp_path: Path) -> GlmConfig:
    fields = model_fields("medium", {"eos_token_id": [0], "pad_token_id": 0}, {"num_nextn_predict_layers": 0})
    write_config(tmp_path / "medium", fields)
    return GlmConfig.from_checkpoint(tmp_path / "medium")


def toy(tmp_path: Path, system: str, step_s: float, behaviour: str = "works", timeout_s: float = 60.0) -> EngineProcess:
    command = (sys.executable, "-c", PROGRAM, str(step_s), behaviour)
    return EngineProcess(EngineSpec(system=system, variant=behaviour, command=command), tmp_path, num_threads=1, timeout_s=timeout_s)


def facts(**changes: object) -> RunFacts:
    return RunFacts(**{"modes": MODES, "goal_mode": "fast", "chosen": CHOSEN, "differences": EQUAL, **changes})  # type: ignore[arg-type]


def result(**seconds: float) -> CaseResult:
    names = {"fast": MODES["fast"], "slow": MODES["deterministic"], "llama": "llama.cpp (a)", "hf": "transformers (b)"}
    return CaseResult(seconds={names[name]: [each] * 3 for name, each in seconds.items()})


# -- the model and the roofline --------------------------------------------------------------------------------------------


def test_the_medium_model_is_the_one_that_goals_were_set_for(medium: GlmConfig) -> None:
    wanted = {
        "hidden_size": 1024, "num_hidden_layers": 11, "first_k_dense_replace": 3, "intermediate_size": 3072, "num_attention_heads": 16,
        "q_lora_rank": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 32, "moe_intermediate_size": 512, "num_experts_per_tok": 4, "n_shared_experts": 1, "index_n_heads": 16,
        "index_head_dim": 128, "index_topk": 512, "vocab_size": 32768, "dtype": "bfloat16",
    }  # fmt: skip
    fields = model_fields("medium", {"eos_token_id": [0], "pad_token_id": 0})
    assert {name: fields[name] for name in wanted} == wanted
    assert [medium.is_moe_layer(layer) for layer in range(11)] == [False] * 3 + [True] * 8


def test_what_a_step_reads(medium: GlmConfig) -> None:
    """Against sums made by hand: below index_topk all rows and no index keys, above it 512 rows and all index keys."""
    embedding, per_expert = 32768 * 1024, 3 * 1024 * 512
    everything = 2 * 592_629_248 + 2 * 8 * 32  # the routing bias is fp32
    short = step_bytes(medium, batch=16, context=127, experts_hit=32, mla_row_bytes=1152, index_row_bytes=256)
    assert short.cache == 16 * 11 * 128 * 1152
    assert short.weights == everything - 2 * embedding + 16 * 2 * 1024
    long = step_bytes(medium, batch=1, context=1023, experts_hit=4, mla_row_bytes=1152, index_row_bytes=256)
    assert long.cache == 11 * 512 * 1152 + 5 * 1024 * 256
    assert long.weights == everything - 2 * embedding + 2 * 1024 - 8 * 28 * per_expert * 2
    assert long.total == long.weights + long.cache


def test_the_share_of_the_bandwidth() -> None:
    assert bandwidth_share_percent(StepBytes(weights=3e9, cache=1e9), step_s=0.2, bandwidth=40e9) == pytest.approx(50.0)


# -- rows ------------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_tokens_a_second_over_the_peers() -> None:
    rows = case_rows(DECODE, result(fast=0.1, slow=0.4, llama=0.25, hf=0.2), facts())
    shown = [(row.value, row.goal, row.met) for row in rows]
    assert shown == [(40.0, "-", True), (2.0, ">= 3", False), (2.5, ">= 2", True), (10.0, "-", True), (0.5, "-", True), (0.625, "-", True)]
    assert rows[2].peer_value == pytest.approx(16.0)


@pytest.mark.parametrize("difference", [0.06, float("nan")])
def test_a_peer_that_computes_something_else_is_missed_however_slow_it_is(difference: float) -> None:
    unequal = facts(differences={**EQUAL, LLAMA_CPP: difference})
    assert not is_equal_enough(difference)
    assert [row.met for row in check_rows([TRANSFORMERS, LLAMA_CPP], unequal)] == [True, False]
    rows = case_rows(DECODE, result(fast=0.1, slow=0.1, llama=9.0, hf=9.0), unequal)
    assert {row.met for row in rows if row.what.endswith(LLAMA_CPP)} == {False}
    assert {row.met for row in rows if row.what.endswith(TRANSFORMERS)} == {True}


def test_a_peer_that_could_not_be_built_is_a_missed_row() -> None:
    absent = facts(chosen={}, differences={}, missing={LLAMA_CPP: "no compiler " * 20, TRANSFORMERS: "not installed"})
    rows = [*check_rows([LLAMA_CPP], absent), *case_rows(DECODE, result(fast=0.1, slow=0.1), absent)]
    missed = [row for row in rows if row.peer is not None]
    assert len(missed) == 5
    assert not any(row.met for row in missed)
    assert all(len(str(row.value)) <= 100 for row in missed)


def test_without_our_own_time_every_row_is_missed() -> None:
    rows = case_rows(DECODE, CaseResult(failures={MODES["fast"]: "it ended"}), facts())
    rows += roofline_rows(DECODE, CaseResult(), facts(), StepBytes(weights=1.0, cache=0.0))
    assert [row.met for row in rows] == [False] * 4
    assert rows[0].value == "it ended"


def test_the_share_is_of_the_bandwidth_measured_beside_the_case() -> None:
    measured = result(fast=0.1, slow=0.4)
    measured.experts, measured.bandwidths = 17.0, [40e9, 80e9, 50e9]
    fast, slow = roofline_rows(DECODE, measured, facts(), StepBytes(weights=3e9, cache=1e9))
    assert (fast.value, fast.met, fast.peer_value) == (pytest.approx(80.0), True, pytest.approx(50.0))
    assert (slow.value, slow.goal) == (pytest.approx(20.0), "-")
    assert "in 100.0 ms, beside 40 to 80 GB/s" in fast.what
    measured.bandwidths = []
    assert not any(row.met for row in roofline_rows(DECODE, measured, facts(), StepBytes(weights=3e9, cache=1e9)))


def test_a_finished_case_keeps_its_variant_when_the_pilot_is_measured_again() -> None:
    variants = {LLAMA_CPP: ["llama.cpp (a)", "llama.cpp (b)"], TRANSFORMERS: ["transformers (c)"]}
    pilot = CaseResult(seconds={"llama.cpp (a)": [0.3], "llama.cpp (b)": [0.2], "transformers (c)": [1.0]})
    finished = CaseResult(seconds={"llama.cpp (a)": [0.3], "ours (fast)": [0.1]})
    chosen = choose_variants(variants, {Kind.DECODE_ONE: pilot, Kind.DECODE_MANY: pilot}, [(Kind.DECODE_MANY, finished)])
    assert chosen == {
        (LLAMA_CPP, Kind.DECODE_ONE): "llama.cpp (b)",
        (LLAMA_CPP, Kind.DECODE_MANY): "llama.cpp (a)",
        (TRANSFORMERS, Kind.DECODE_ONE): "transformers (c)",
        (TRANSFORMERS, Kind.DECODE_MANY): "transformers (c)",
    }


def test_every_goal_is_in_the_full_run() -> None:
    goals = {(case.name, peer): goal for case in FULL_CASES for peer, goal in case.goals.items()}
    assert goals == {
        ("decode, context 128, batch 1", LLAMA_CPP): 0.8,
        ("decode, context 128, batch 8", LLAMA_CPP): 1.0,
        ("decode, context 128, batch 16", LLAMA_CPP): 1.0,
        ("decode, context 1024, batch 1", TRANSFORMERS): 5.0,
        ("decode, context 1024, batch 1", LLAMA_CPP): 0.8,
        ("decode, context 1024, batch 8", LLAMA_CPP): 1.0,
        ("decode, context 1024, batch 16", TRANSFORMERS): 25.0,
        ("decode, context 1024, batch 16", LLAMA_CPP): 1.0,
        ("decode, context 8192, batch 1", TRANSFORMERS): 100.0,
        ("prefill 512", TRANSFORMERS): 1.0,
        ("prefill 1024", LLAMA_CPP): 1.5,
        ("prefill 2048", TRANSFORMERS): 3.0,
    }
    assert all(case.has_roofline_goal == (case.batch == 16 and case.context <= 1024) for case in FULL_CASES)


# -- engines ---------------------------------------------------------------------------------------------------------------


def test_engines_take_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    with (
        toy(tmp_path, OURS, 0.5) as ours,
        toy(tmp_path, LLAMA_CPP, 0.25, "fails") as failing,
        toy(tmp_path, "other", 1.0, "ends") as ending,
    ):
        measured = measure_case(DECODE, [failing, ours, ending], vocab_size=50, seed=0)
        assert measured.seconds == {"ours (works)": [2.0] * 3}
        assert set(measured.failures) == {"llama.cpp (fails)", "other (ends)"}
        assert "out of luck" in measured.failures["llama.cpp (fails)"]
        assert compare_log_probs(ours, failing, [[1, 2, 3], [4]]) == pytest.approx(0.25)
        assert measure_case(Case(context=30, repeats=2), [ours], vocab_size=50, seed=0).seconds == {"ours (works)": [0.03] * 2}


def test_the_bandwidth_is_measured_once_a_repeat_by_the_gauge(tmp_path: Path) -> None:
    with toy(tmp_path, OURS, 0.5) as ours, toy(tmp_path, LLAMA_CPP, 0.25) as peer:
        assert measure_case(DECODE, [ours, peer], vocab_size=50, seed=0, gauge=ours).bandwidths == [5e9] * 3
        assert measure_case(DECODE, [ours, peer], vocab_size=50, seed=0).bandwidths == []


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    spec = EngineSpec(system=LLAMA_CPP, variant="x", command=(sys.executable, "-c", "raise SystemExit('no such model')"))
    with pytest.raises(EngineFailed, match="no such model"), EngineProcess(spec, tmp_path, num_threads=1, timeout_s=30):
        pass


def test_an_engine_that_hangs_is_given_up(tmp_path: Path) -> None:
    spec = EngineSpec(system=LLAMA_CPP, variant="x", command=(sys.executable, "-c", "import sys; sys.stdin.read()"))
    with pytest.raises(EngineFailed, match="no answer within"), EngineProcess(spec, tmp_path, num_threads=1, timeout_s=0.2):
        pass


def test_results_are_taken_up_again_by_the_same_commit_only(tmp_path: Path) -> None:
    first = SavedResults(tmp_path / "r.json", "abc", is_resumed=False)
    first.add_case("c", result(fast=0.1))
    first.add_fact("bandwidth", 5.0)
    again = SavedResults(tmp_path / "r.json", "abc", is_resumed=True)
    assert again.case("c") == result(fast=0.1)
    assert again.fact("bandwidth") == 5.0
    assert SavedResults(tmp_path / "r.json", "def", is_resumed=True).case("c") is None
    assert SavedResults(tmp_path / "r.json", "abc", is_resumed=False).case("c") is None
