"""Loading a rank, running plans, generating in one process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_runtime.engine.offline import generate
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import ConfigError, EngineFault, PromptTooLong
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import SMALL_FIELDS, write_checkpoint

SPREAD = ParallelLayout(pcp_size=2, is_expert_parallel=True)
GREEDY = SamplingParameters(max_tokens=6, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def runtime(directory: Path) -> GlmRuntime:
    return GlmRuntime.load(RuntimeConfig(checkpoint=directory, num_threads=1))


@pytest.fixture
def runner(runtime: GlmRuntime) -> ModelRunner:
    return runtime.attach(PoolMemory(8, runtime.layout.block_bytes))


def piece(name: str, tokens: list[int], start: int = 0, **options: Any) -> SequenceSlice:
    blocks = {"a": [1, 5], "b": [2, 3]}[name]
    return SequenceSlice(
        sequence_id=SequenceId(name), tokens=tokens, start=start, block_table=[BlockId(block) for block in blocks], **options
    )


def step(*pieces: SequenceSlice) -> StepPlan:
    return StepPlan(step_number=9, slices=pieces)


def test_a_runtime_knows_its_pool_and_its_limits(runtime: GlmRuntime) -> None:
    assert runtime.num_blocks == (512 << 20) // runtime.layout.block_bytes
    assert runtime.max_model_len_tokens == SMALL_FIELDS["max_position_embeddings"]
    assert runtime.layout.components[0].encoding.startswith("fp32"), "auto takes the checkpoint's dtype"
    assert len(runtime.weights_version) == 32
    assert runtime.layout.model_digest == runtime.weights_version


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cache_bytes": 100}, "runtime.cache_bytes"),
        ({"max_model_len_tokens": 4096}, "runtime.max_model_len_tokens"),
        ({"max_model_len_tokens": 0}, "runtime.max_model_len_tokens"),
        ({"max_step_tokens": 0}, "runtime.max_step_tokens"),
        ({"num_threads": 0}, "runtime.num_threads"),
        ({"numerics": "exact"}, "runtime.numerics"),
        ({"block_size_tokens": 48}, "runtime.block_size_tokens"),
        ({"cache_format": "fp7"}, "runtime.cache_format"),
        ({"cache_format": "fp8"}, "runtime.cache_format"),
        ({"cache_format": "fp8_e4m3"}, "runtime.index_format"),
        ({"attention_backend": "flashmla_sparse"}, "runtime.attention_backend"),
        ({"index_format": "bf16"}, "runtime.index_format"),
        ({"index_scale": "fp32"}, "runtime.index_scale"),
        ({"num_balance_steps": -1}, "runtime.num_balance_steps"),
        ({"num_balance_steps": 5, "parallel": SPREAD}, "runtime.num_balance_steps"),
        ({"parallel": dataclasses.replace(SPREAD, num_redundant_experts=1)}, "runtime.parallel.num_redundant_experts"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(directory: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GlmRuntime.load(dataclasses.replace(RuntimeConfig(checkpoint=directory), **changes))
    assert caught.value.path == field


def test_a_pool_of_another_layout_is_refused(runtime: GlmRuntime) -> None:
    with pytest.raises(ValueError, match="this layout's have"):
        runtime.attach(PoolMemory(2, runtime.layout.block_bytes * 2))


def test_only_slices_that_ask_are_sampled(runner: ModelRunner) -> None:
    result = runner.run(step(piece("a", [1, 2, 3]), piece("b", [4, 5], sampling=GREEDY)))
    assert set(result.samples) == {"b"}
    assert result.step_number == 9


def test_an_empty_plan_has_an_empty_result(runner: ModelRunner) -> None:
    assert runner.run(step()).samples == {}


def test_a_split_prompt_gives_the_token_of_the_whole(runner: ModelRunner) -> None:
    tokens = [(7 * i) % 190 for i in range(100)]
    whole = runner.run(step(piece("a", tokens, sampling=GREEDY))).samples["a"]
    runner.run(step(piece("b", tokens[:64])))
    assert runner.run(step(piece("b", tokens[64:], 64, sampling=GREEDY))).samples["b"] == whole


def test_a_damaged_cache_stops_the_engine(runtime: GlmRuntime) -> None:
    memory = PoolMemory(8, runtime.layout.block_bytes)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    runner = runtime.attach(memory)
    with pytest.raises(EngineFault, match="not finite"):
        runner.run(step(piece("a", [1], 30, sampling=GREEDY)))


def test_generate_equals_a_loop_over_whole_prompts(runtime: GlmRuntime) -> None:
    prompt = [(5 * i) % 190 for i in range(61)]
    (tokens,) = generate(runtime, [prompt], GREEDY)
    assert len(tokens) == GREEDY.max_tokens
    runner = runtime.attach(PoolMemory(8, runtime.layout.block_bytes))
    for index, token in enumerate(tokens):
        known = prompt + tokens[:index]
        assert runner.run(step(piece("a", known, sampling=GREEDY))).samples["a"] == (token,)


def test_generate_ends_at_a_stop_token_and_keeps_it(runtime: GlmRuntime) -> None:
    prompt = [3, 1, 4, 1, 5]
    (free,) = generate(runtime, [prompt], GREEDY)
    stopping = SamplingParameters(max_tokens=6, seed=0, temperature=0.0, stop_token_ids=(free[2],))
    assert generate(runtime, [prompt], stopping) == [free[: free.index(free[2]) + 1]]


def test_generate_takes_sampling_per_prompt(runtime: GlmRuntime) -> None:
    each = [SamplingParameters(max_tokens=count, seed=count) for count in (1, 4)]
    assert [len(tokens) for tokens in generate(runtime, [[1, 2], [1, 2]], each)] == [1, 4]


def test_generate_refuses_what_is_longer_than_the_model(runtime: GlmRuntime) -> None:
    with pytest.raises(PromptTooLong, match="the limit is 2048"):
        generate(runtime, [[1] * 2045], GREEDY)


def test_fast_mode_computes_in_the_checkpoints_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**SMALL_FIELDS, "dtype": "bfloat16"})
    fast = GlmRuntime.load(RuntimeConfig(checkpoint=tmp_path, numerics="fast", num_threads=1))
    assert fast.model.weights.embedding.dtype == torch.bfloat16
    (tokens,) = generate(fast, [[(3 * i) % 190 for i in range(90)]], GREEDY, chunk_tokens=16)
    assert len(tokens) == GREEDY.max_tokens


def test_generate_tells_each_token_and_may_be_told_to_end(runtime: GlmRuntime) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    free = generate(runtime, prompts, GREEDY)
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def take(number: int, token: int) -> bool:
        told[number].append(token)
        return number != 1 or len(told[1]) < 3

    outputs = generate(runtime, prompts, GREEDY, on_token=take)
    assert outputs == [free[0], free[1][:3], free[2]] == list(told.values())


def test_generate_reuses_blocks_of_what_has_ended(directory: Path, runtime: GlmRuntime) -> None:
    """A pool of three blocks, five prompts of one or two: each waits for blocks, and reads nothing of those before it."""
    prompts = [[(3 * i + n) % 190 for i in range(40 + 12 * n)] for n in range(5)]
    small = GlmRuntime.load(RuntimeConfig(checkpoint=directory, num_threads=1, cache_bytes=3 * runtime.layout.block_bytes))
    assert generate(small, prompts, GREEDY, max_batch_sequences=3) == [generate(runtime, [prompt], GREEDY)[0] for prompt in prompts]
    with pytest.raises(PromptTooLong, match="the cache holds 192"):
        generate(small, [[1] * 190], GREEDY)
    assert generate(small, [], GREEDY) == []
