"""Deterministic mode: a row's bits depend on its own sequence alone. Everything here is equality without a margin."""

import pytest
import torch
from torch import Tensor

from glm_runtime.engine.offline import generate
from glm_runtime.native.build import are_kernels_expected
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.messages import SamplingParameters
from tests.conformance.glm_schedules import ScheduledRuntime, chunked, decoded, mixed
from tests.glm_checkpoints import CACHE_CHOICES, TINY

LENGTH = 700
"""Past one tile of 512 index keys and far past index_topk."""


@pytest.fixture(scope="module")
def runtime() -> GlmRuntime:
    return GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [LENGTH, *torch.randint(1, 200, (15,), generator=generator).tolist()]
    return [torch.randint(0, 2500, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def alone(runtime: GlmRuntime, prompts: list[list[int]]) -> Tensor:
    return ScheduledRuntime(runtime).logits(prompts[:1], chunked(LENGTH, LENGTH))[0]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    rows = (actual != expected).any(-1).nonzero().flatten().tolist()
    assert not rows, f"{len(rows)} of {len(expected)} rows differ, the first is {rows[0]}"


@pytest.mark.parametrize("chunk", [10, 64, 65, 513])
def test_chunking_does_not_change_a_bit(runtime: GlmRuntime, prompts: list[list[int]], alone: Tensor, chunk: int) -> None:
    assert_same_bits(ScheduledRuntime(runtime).logits(prompts[:1], chunked(LENGTH, chunk))[0], alone)


def test_decode_rows_equal_prefill_rows(runtime: GlmRuntime, prompts: list[list[int]], alone: Tensor) -> None:
    assert_same_bits(ScheduledRuntime(runtime).logits(prompts[:1], decoded(LENGTH, LENGTH - 60))[0], alone)


def test_other_blocks_do_not_change_a_bit(runtime: GlmRuntime, prompts: list[list[int]], alone: Tensor) -> None:
    paged = ScheduledRuntime(runtime, seed=99, spare_blocks=40)
    assert_same_bits(paged.logits(prompts[:1], chunked(LENGTH, LENGTH))[0], alone)


def test_a_batch_of_16_does_not_change_a_bit(runtime: GlmRuntime, prompts: list[list[int]], alone: Tensor) -> None:
    lengths = [len(prompt) for prompt in prompts]
    batched = ScheduledRuntime(runtime, seed=3)
    for chunks in (lengths, [90] * 16, [37, *[1] * 7, *[5] * 8]):
        results = batched.logits(prompts, mixed(lengths, chunks))
        assert_same_bits(results[0], alone)
    for number in (1, 7, 15):
        single = batched.logits([prompts[number]], chunked(lengths[number], lengths[number]))[0]
        assert_same_bits(results[number], single)


def test_compiled_kernels_need_no_padding_of_rows(runtime: GlmRuntime) -> None:
    """All of the above ran on them, where they can be had."""
    is_native = are_kernels_expected("auto")
    assert (runtime.model.numerics.impl == "native") == is_native
    assert (runtime.model.numerics.gemm.row_tile == 1) == is_native


def test_without_compiled_kernels_a_row_keeps_its_bits_too(prompts: list[list[int]]) -> None:
    by_torch = GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1, kernels="torch"))
    assert by_torch.model.numerics.impl == "cpu"
    few = [prompts[0][:150], *(prompt[:70] for prompt in prompts[1:])]
    lengths = [len(prompt) for prompt in few]
    alone = ScheduledRuntime(by_torch).logits(few[:1], chunked(150, 150))[0]
    for steps in (chunked(150, 65), decoded(150, 140)):
        assert_same_bits(ScheduledRuntime(by_torch, seed=7, spare_blocks=20).logits(few[:1], steps)[0], alone)
    assert_same_bits(ScheduledRuntime(by_torch, seed=3).logits(few, mixed(lengths, [60, *[1] * 7, *[50] * 8]))[0], alone)


@pytest.mark.parametrize("threads", [2, 3])
def test_compiled_kernels_give_the_same_bits_on_any_number_of_threads(
    runtime: GlmRuntime, prompts: list[list[int]], alone: Tensor, threads: int
) -> None:
    if runtime.model.numerics.impl != "native":
        pytest.skip("the BLAS promises this for the number of threads it was probed with")
    torch.set_num_threads(threads)
    try:
        assert_same_bits(ScheduledRuntime(runtime).logits(prompts[:1], chunked(LENGTH, 513))[0], alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["fp32", "bf16+fp8", "fp8_e4m3", "fp8_ds_mla+ue8m0", "nvfp4_ds_mla+mxfp4"])
def test_no_cache_format_changes_a_bit_with_batch_chunks_or_blocks(prompts: list[list[int]], name: str) -> None:
    """Keys are read as stored, a chunk's own included, so that a row reads the same numbers however it came to its step."""
    runtime = GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1, **CACHE_CHOICES[name]))
    few = [prompts[0][:580], *(prompt[:70] for prompt in prompts[1:])]
    lengths = [len(prompt) for prompt in few]
    alone = ScheduledRuntime(runtime).logits(few[:1], chunked(580, 580))[0]
    for steps in (chunked(580, 65), decoded(580, 570)):
        assert_same_bits(ScheduledRuntime(runtime, seed=7, spare_blocks=20).logits(few[:1], steps)[0], alone)
    batched = ScheduledRuntime(runtime, seed=3).logits(few, mixed(lengths, [250, *[1] * 7, *[50] * 8]))
    assert_same_bits(batched[0], alone)
    for number in (1, 15):
        assert_same_bits(batched[number], ScheduledRuntime(runtime).logits([few[number]], chunked(lengths[number], lengths[number]))[0])


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(max_tokens=12, seed=1, temperature=0.0), SamplingParameters(max_tokens=12, seed=1, top_p=0.9)]
)
def test_generated_tokens_do_not_depend_on_batch_or_chunks(
    runtime: GlmRuntime, prompts: list[list[int]], sampling: SamplingParameters
) -> None:
    few = [prompt[:150] for prompt in prompts[:4]]
    single = [generate(runtime, [prompt], sampling)[0] for prompt in few]
    assert generate(runtime, few, sampling) == single
    assert generate(runtime, few, sampling, chunk_tokens=33) == single
    assert generate(runtime, few, sampling, max_batch_sequences=2) == single
