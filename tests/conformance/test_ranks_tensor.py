"""Tensor and expert parallelism on real ranks: the answers of one rank, and as many sums as the model has owed ones."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.engine.grammar_desk import load_grammars
from glm_runtime.engine.offline import generate
from glm_runtime.engine.plan_codec import PlanDecoder, PlanEncoder
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.parameters import reads_history
from kv_transfer.errors import ConfigError
from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import (
    CUTTABLE_FIELDS,
    FP8_CONFIG,
    GLM53_FIELDS,
    HEADS_OF_448_FIELDS,
    NVFP4_CONFIG,
    SMALL_FIELDS,
    TINY,
    nvfp4_tensors,
    quantise_tensors,
    write_checkpoint,
    write_quantised,
)
from tests.prompts import make_prompt
from tests.rank_answers import Answers, assert_answers, config_of, generate_on, load_rank, one_rank_answers
from tests.rank_pool import RankPool, RanksFailed

PROMPTS = [make_prompt(length, number) for number, length in enumerate((5, 64, 90, 130, 63, 1))]
"""Around block edges, and beyond the 64 tokens that the indexer selects."""
GREEDY = SamplingParameters(max_tokens=40, seed=0, temperature=0.0)
DRAWN = SamplingParameters(max_tokens=40, seed=11, temperature=0.8)
TWO = ParallelLayout(tp_size=2)
LAYOUTS = [
    TWO,
    ParallelLayout(tp_size=4),
    ParallelLayout(tp_size=2, is_expert_parallel=True),
    ParallelLayout(tp_size=4, is_expert_parallel=True, replicates_embedding=True),
]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "drafts": {},
    "no drafts": {"max_drafts": 0},
    "chunks": {"chunk_tokens": 37, "max_batch_sequences": 3},
}
on_each = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
CONFIG = config_of(TINY)


@pytest.fixture(scope="module")
def greedy() -> Answers:
    return one_rank_answers(CONFIG, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def drawn() -> Answers:
    return one_rank_answers(CONFIG, PROMPTS, DRAWN)


def check(rank_pool: RankPool, layout: ParallelLayout, config: RuntimeConfig, expected: Answers, *given: Any) -> None:
    """given: prompts, sampling, options."""
    first, *others = rank_pool.run(layout, generate_on, config, *given)
    share = assert_answers(first, *expected)
    print(f"{layout.describe()}: {share:.1%} of the tokens come after a tie")
    assert all(answers == first for answers in others), "all ranks know what the first has drawn"


@on_each
@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_one_rank(rank_pool: RankPool, greedy: Answers, layout: ParallelLayout, way: str) -> None:
    check(rank_pool, layout, CONFIG, greedy, PROMPTS, GREEDY, WAYS[way])


@on_each
@pytest.mark.parametrize("way", ["drafts", "chunks"])
def test_drawn_answers_are_those_of_one_rank(rank_pool: RankPool, drawn: Answers, layout: ParallelLayout, way: str) -> None:
    check(rank_pool, layout, CONFIG, drawn, PROMPTS, DRAWN, WAYS[way])


def test_drafting_that_stops_early_stops_on_all_ranks(rank_pool: RankPool, greedy: Answers) -> None:
    check(rank_pool, TWO, config_of(TINY, min_draft_probability=0.5), greedy, PROMPTS, GREEDY, {})


@pytest.mark.parametrize("verification", ["ratio", "ratio_greedy"])
def test_the_ratio_test_leaves_greedy_answers_alone(rank_pool: RankPool, greedy: Answers, verification: str) -> None:
    config = config_of(TINY, verification=verification)
    mixed = [SamplingParameters(max_tokens=40, seed=3) if number % 2 else GREEDY for number in range(len(PROMPTS))]
    first, second = rank_pool.run(TWO, generate_on, config, PROMPTS, mixed, {"max_batch_sequences": 3})
    assert first == second
    assert_answers(first[::2], greedy[0][::2], greedy[1][::2])
    assert rank_pool.run(TWO, generate_on, config, PROMPTS, mixed, {"max_batch_sequences": 3})[0] == first, "a seed repeats an answer"


def test_with_torch_alone(rank_pool: RankPool, greedy: Answers) -> None:
    check(rank_pool, LAYOUTS[2], config_of(TINY, kernels="torch"), greedy, PROMPTS, GREEDY, {})


def test_in_fast_mode_all_ranks_say_the_same(rank_pool: RankPool) -> None:
    """Sums travel as bf16. How good the answers are is another matter; that all ranks have them is not."""
    answers = rank_pool.run(LAYOUTS[3], generate_on, config_of(TINY, numerics="fast"), PROMPTS, GREEDY, {})
    assert all(each == answers[0] for each in answers)
    assert {len(each) for each in answers[0]} == {40}


def test_a_processed_request_is_drawn_by_the_leading_rank(rank_pool: RankPool) -> None:
    """Penalties, bad words, allowed tokens: what followers have no part in."""
    sampling = [
        SamplingParameters(max_tokens=24, seed=1, temperature=0.7, repetition_penalty=1.2, top_k=20),
        SamplingParameters(max_tokens=24, seed=1, temperature=0.0, allowed_token_ids=tuple(range(200))),
        SamplingParameters(max_tokens=24, seed=1, temperature=0.0, min_tokens=10, stop_token_ids=(2524,)),
    ]
    expected = generate(GlmRuntime.load(CONFIG), PROMPTS[:3], sampling)
    first, second = rank_pool.run(TWO, generate_on, CONFIG, PROMPTS[:3], sampling, {})
    assert first == second == expected


@pytest.mark.parametrize("layout", [TWO, ParallelLayout(tp_size=2, is_expert_parallel=True)], ids=lambda layout: layout.describe())
@pytest.mark.parametrize(
    ("fields", "quantisation", "pack"),
    [(HEADS_OF_448_FIELDS, FP8_CONFIG, quantise_tensors), (CUTTABLE_FIELDS, NVFP4_CONFIG, nvfp4_tensors)],
    ids=["fp8", "nvfp4"],
)
def test_quantised_checkpoints(
    rank_pool: RankPool, tmp_path: Path, layout: ParallelLayout, fields: Mapping[str, Any], quantisation: Mapping[str, Any], pack: Any
) -> None:
    config = config_of(write_quantised(tmp_path, fields, quantisation, pack), cache_format="fp32")
    prompts = [
        [(7 * place + number) % CUTTABLE_FIELDS["vocab_size"] for place in range(length)] for number, length in enumerate((3, 40, 70))
    ]
    check(rank_pool, layout, config, one_rank_answers(config, prompts, GREEDY), prompts, GREEDY, {})


def test_a_rank_of_another_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 'tp2', and this process is a rank of 'one rank'") as caught:
        GlmRuntime.load(RuntimeConfig(checkpoint=TINY, parallel=TWO))
    assert caught.value.path == "runtime.parallel"


def test_a_layout_that_the_model_does_not_fit_is_refused_before_weights_are_read() -> None:
    with pytest.raises(ConfigError, match="tp_size is 3, which does not divide the model's num_attention_heads, 4") as caught:
        GlmRuntime.load(RuntimeConfig(checkpoint=TINY, parallel=ParallelLayout(tp_size=3)))
    assert caught.value.path == "runtime.parallel"


def runner_on(context: ParallelContext, config: RuntimeConfig) -> ModelRunner:
    runtime = load_rank(context, config)
    return runtime.attach(PoolMemory(8, runtime.layout.block_bytes))


def piece(tokens: Sequence[int], start: int = 0, **fields: Any) -> SequenceSlice:
    blocks = [BlockId(block) for block in range(8)]
    return SequenceSlice(sequence_id=SequenceId("a"), tokens=list(tokens), start=start, block_table=blocks, **fields)


def run_one(context: ParallelContext, config: RuntimeConfig, given: SequenceSlice) -> tuple[StepResult, dict[Operation, int]]:
    runner = runner_on(context, config)
    context.meter.clear()
    result = runner.run(StepPlan(step_number=3, slices=(given,)))
    return result, {operation: calls for (kind, operation), calls in context.meter.calls.items() if kind is GroupKind.TENSOR}


class TestCounts:
    """How often the ranks meet in a step. Source: FACTS 6.1."""

    without_drafts = config_of(TINY, max_drafts=0)

    @pytest.mark.parametrize("is_replicated", [False, True], ids=["cut embedding", "whole embedding"])
    def test_two_sums_a_layer_and_one_for_the_embedding(self, rank_pool: RankPool, is_replicated: bool) -> None:
        layout = ParallelLayout(tp_size=2, replicates_embedding=is_replicated)
        for _, calls in rank_pool.run(layout, run_one, self.without_drafts, piece(range(20))):
            assert calls == {Operation.ALL_REDUCE: 2 * 7 + (not is_replicated)}

    def test_expert_parallelism_over_equal_rows_adds_no_exchange(self, rank_pool: RankPool) -> None:
        layout = ParallelLayout(tp_size=2, is_expert_parallel=True)
        for _, calls in rank_pool.run(layout, run_one, self.without_drafts, piece(range(20))):
            assert calls == {Operation.ALL_REDUCE: 2 * 7 + 1}

    def test_a_greedy_token_takes_a_few_numbers_and_a_drawn_one_all_logits(self, rank_pool: RankPool) -> None:
        for sampling, num_gathers in ((GREEDY, 1), (DRAWN, 2)):
            for _, calls in rank_pool.run(TWO, run_one, self.without_drafts, piece(range(20), sampling=sampling)):
                assert calls == {Operation.ALL_REDUCE: 15, Operation.ALL_GATHER: num_gathers}

    def test_a_draft_step_takes_three_sums(self, rank_pool: RankPool) -> None:
        given = piece(range(20), sampling=GREEDY, num_next_drafts=5)
        for result, calls in rank_pool.run(TWO, run_one, CONFIG, given):
            assert result.num_draft_steps == 5
            assert calls == {Operation.ALL_REDUCE: 15 + 3 * 5, Operation.ALL_GATHER: 1 + 5}

    @pytest.mark.parametrize("is_replicated", [False, True], ids=["cut embedding", "whole embedding"])
    def test_glm53s_layers_have_156_sums(self, rank_pool: RankPool, tmp_path: Path, is_replicated: bool) -> None:
        """78 layers in the real order, each of the smallest size."""
        kept = ("architectures", "first_k_dense_replace", "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq",
                "indexer_types", "mlp_layer_types", "num_hidden_layers")  # fmt: skip
        write_checkpoint(tmp_path, {**SMALL_FIELDS, "vocab_size": 196, **{name: GLM53_FIELDS[name] for name in kept}})
        assert GlmConfig.from_checkpoint(tmp_path).num_hidden_layers == 78
        layout = ParallelLayout(tp_size=2, replicates_embedding=is_replicated)
        for _, calls in rank_pool.run(layout, run_one, config_of(tmp_path, max_drafts=0), piece(range(20))):
            assert calls == {Operation.ALL_REDUCE: 156 if is_replicated else 157}


def test_log_probabilities_stay_on_the_leading_rank(rank_pool: RankPool) -> None:
    sampling = SamplingParameters(max_tokens=4, seed=0, temperature=0.0, logprobs=2)
    given = piece(PROMPTS[2], sampling=sampling, following=PROMPTS[2][1:], num_prompt_logprobs=1, keeps_hidden=True)
    (first, _), (second, _) = rank_pool.run(TWO, run_one, CONFIG, given)
    runtime = GlmRuntime.load(CONFIG)
    alone = runtime.attach(PoolMemory(8, runtime.layout.block_bytes)).run(StepPlan(step_number=3, slices=(given,)))
    assert first.samples == second.samples == alone.samples
    assert first.hidden_states == second.hidden_states
    assert not second.logprobs
    assert not second.prompt_logprobs
    name = SequenceId("a")
    assert len(first.prompt_logprobs[name]) == len(PROMPTS[2]) - 1
    for told, expected in ((first.logprobs, alone.logprobs), (first.prompt_logprobs, alone.prompt_logprobs)):
        for found, right in zip(told[name], expected[name], strict=True):
            assert math.isclose(found.logprob, right.logprob, abs_tol=1e-4)
            assert (found.rank, found.top[0][0]) == (right.rank, right.top[0][0])


def damage_last_token(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][-1, 5] = torch.nan


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_are_a_fault_on_all_ranks(rank_pool: RankPool, tmp_path: Path, sampling: SamplingParameters) -> None:
    """Only one rank has the damaged part of the head, and it is not the one that draws."""
    write_checkpoint(tmp_path, CUTTABLE_FIELDS, change=damage_last_token)
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(TWO, run_one, config_of(tmp_path), piece(range(20), sampling=sampling))
    assert {rank: error.kind for rank, error in caught.value.errors.items()} == {0: "EngineFault", 1: "EngineFault"}


def test_sequences_are_seeded_with_drafts_on_all_ranks(rank_pool: RankPool) -> None:
    """As after a hand-off: the hidden state of the row before comes from elsewhere, and drafts are verified in the same step."""
    results = rank_pool.run(TWO, run_seeded, CONFIG)
    assert results[0] == results[1]
    tokens, num_drafts = results[0]
    assert num_drafts == 3
    assert len(tokens) >= 1


def run_seeded(context: ParallelContext, config: RuntimeConfig) -> tuple[tuple[int, ...], int]:
    runner = runner_on(context, config)
    prompt, name = PROMPTS[2], SequenceId("a")
    first = runner.run(StepPlan(step_number=0, slices=(piece(prompt, sampling=GREEDY, keeps_hidden=True),)))
    token = first.samples[name][0]
    seeded = piece([token], len(prompt), sampling=GREEDY, token_index=1, seed_hidden=first.hidden_states[name], num_seed_drafts=3)
    second = runner.run(StepPlan(step_number=1, slices=(seeded,)))
    follow = runner.run(StepPlan(step_number=2, slices=(piece([token], len(prompt), sampling=GREEDY, token_index=1),)))
    assert second.samples[name][0] == follow.samples[name][0], "what is drawn does not depend on drafts"
    return second.samples[name], 3


def decode_alone(context: ParallelContext, config: RuntimeConfig, prompt: list[int], sampling: SamplingParameters) -> list[int]:
    """As served: history and grammar are the leading rank's alone; the others get the plan as it is sent to them."""
    runner, grammars = runner_on(context, config), None
    encoder, decoder = PlanEncoder(), PlanDecoder()
    history = TokenHistory(prompt) if context.leads and reads_history(sampling) else None
    if context.leads and sampling.grammar is not None:
        grammars = load_grammars(config.checkpoint, GlmConfig.from_checkpoint(config.checkpoint))
        assert grammars is not None
    grammar = grammars.start(sampling.grammar) if grammars is not None and sampling.grammar is not None else None
    tokens, output, drafts = list(prompt), list[int](), ()
    for step in range(sampling.max_tokens):
        given = tokens[0 if step == 0 else -1 :]
        fields = {"history": history, "grammar": grammar, "token_index": len(output), "num_drafts": len(drafts), "num_next_drafts": 3}
        plan = StepPlan(step_number=step, slices=(piece([*given, *drafts], len(tokens) - len(given), sampling=sampling, **fields),))
        frame = context.worker.broadcast_bytes(encoder.encode(plan) if context.leads else b"")
        result = runner.run(plan if context.leads else decoder.decode(frame))
        run, drafts = result.samples[SequenceId("a")], result.drafts.get(SequenceId("a"), ())
        tokens += run
        output += run
        if history is not None:
            history.extend(run)
        if grammar is not None:
            assert grammar.accept(run)
        if len(output) >= sampling.max_tokens or set(run) & set(sampling.stop_token_ids):
            break
    return output


ENDS = (2524, 2531, 2533)
SCHEMA = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text='{"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}')


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(max_tokens=24, seed=1, temperature=0.0, frequency_penalty=0.7, bad_words=((5,), (17, 3))),
        SamplingParameters(max_tokens=24, seed=1, temperature=0.0, grammar=SCHEMA, stop_token_ids=ENDS),
        SamplingParameters(max_tokens=24, seed=1, temperature=0.9, grammar=SCHEMA, stop_token_ids=ENDS),
    ],
    ids=["penalties", "grammar", "drawn in a grammar"],
)
def test_followers_need_neither_histories_nor_grammars(rank_pool: RankPool, sampling: SamplingParameters) -> None:
    prompt = PROMPTS[2]
    first, second = rank_pool.run(TWO, decode_alone, CONFIG, prompt, sampling)
    assert first == second
    expected = generate(GlmRuntime.load(CONFIG), [prompt], sampling)[0]
    assert first[: len(expected)] == expected, "a run may go beyond max_tokens"


def last_hidden(context: ParallelContext, config: RuntimeConfig) -> list[bytes]:
    """Of one prompt, alone and whole, in chunks, and beside another sequence."""
    prompt, found = PROMPTS[3], []
    for ends, has_company in (((130,), False), ((64, 128, 130), False), ((37, 130), True)):
        runner, start = runner_on(context, config), 0
        for end in ends:
            own = piece(prompt[start:end], start, keeps_hidden=True, next_token=7)
            blocks = [BlockId(block) for block in (4, 5, 6)]
            other = SequenceSlice(sequence_id=SequenceId("b"), tokens=PROMPTS[1], start=0, block_table=blocks, next_token=7)
            result = runner.run(StepPlan(step_number=0, slices=(other, own) if has_company else (own,)))
            start = end
        found.append(result.hidden_states[SequenceId("a")])
    return found


@on_each
def test_a_rows_bits_depend_on_its_sequence_and_the_layout_alone(rank_pool: RankPool, layout: ParallelLayout) -> None:
    for found in rank_pool.run(layout, last_hidden, CONFIG):
        assert len(set(found)) == 1
