"""The selection of a step: scored and unscored rows together, over a poisoned pool, in every index format."""

import dataclasses

import pytest
import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.linear import Gemm
from glm_runtime.ops.fused_q import index_queries
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.index_select import index_select
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowKind
from glm_runtime.step_batch import StepBatch
from kv_transfer.identity import BlockId, SequenceId
from tests.glm_checkpoints import TINY
from tests.unit.glm_runtime.ops.pools import NATIVE, fill, poisoned_region

SERVING = ["cpu", NATIVE]
KINDS = [RowKind.FP32, RowKind.BF16, RowKind.INDEX_FP8_FP32, RowKind.INDEX_FP8_UE8M0, RowKind.INDEX_MXFP4]
TOPK, HEADS, WIDTH, BLOCKS = 64, 5, 128, 60
"""The shipped checkpoint's index_topk, by which `build_batch` tells scored rows."""

STEPS = {
    # name: (first position, rows) of each sequence
    "decode": [(700, 1), (65, 1), (64, 1), (63, 1), (3, 1), (511, 1), (512, 1)],
    "prefill": [(30, 120)],
    "mixed": [(0, 10), (500, 37), (100, 1), (63, 3), (10, 1), (640, 6)],
}


def step(name: str, kind: RowKind, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, CacheRegion, StepBatch]:
    """Queries and weights as `index_queries` gives them, keys, and the step. No two scores tie, none falls out by rounding."""
    generator = torch.Generator().manual_seed(len(name))
    region = poisoned_region(WIDTH, num_blocks=BLOCKS, encoding=kind.value)
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    slices = []
    for number, (start, rows) in enumerate(STEPS[name]):
        table = [BlockId(free.pop()) for _ in range(-(-(start + rows) // 64))]
        fill(region, torch.tensor(table), torch.randn(start + rows, WIDTH, generator=generator))
        slices.append(SequenceSlice(sequence_id=SequenceId(str(number)), tokens=[1] * rows, start=start, block_table=table))
    plan = StepPlan(step_number=0, slices=tuple(slices))
    config = GlmConfig.from_checkpoint(TINY)
    batch = build_batch(plan, config, block_size_tokens=64, num_blocks=BLOCKS, row_tile=16)
    num_rows = batch.tokens.shape[0]
    flat, weights = torch.randn(num_rows, HEADS, WIDTH, generator=generator), torch.randn(num_rows, HEADS, generator=generator)
    angle = torch.rand(num_rows, 8, generator=generator)
    return *index_queries(flat.to(dtype), weights, angle.cos(), angle.sin(), region.row_format, impl="cpu"), region, batch


def selected(inputs: tuple[Tensor, Tensor, CacheRegion, StepBatch], impl: Impl, scratch_bytes: int = 32 << 20) -> Tensor:
    lists = torch.full((inputs[0].shape[0], TOPK), 12345)
    index_select(*inputs, TOPK, lists=lists, gemm=Gemm(16), scratch_bytes=scratch_bytes, impl=impl)
    return lists


def differing_tokens(actual: Tensor, expected: Tensor) -> int:
    return sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("scratch_bytes", [1, 32 << 20])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("name", STEPS)
def test_equals_reference(name: str, kind: RowKind, scratch_bytes: int, impl: Impl) -> None:
    inputs = step(name, kind)
    actual, expected = selected(inputs, impl, scratch_bytes), selected(inputs, "reference")
    assert torch.equal((actual >= 0).sum(1), (expected >= 0).sum(1))
    assert (actual.where(actual >= 0, 1 << 20).diff() >= 0).all(), "ascending, -1 after the last"
    assert differing_tokens(actual, expected) <= 2, "a boundary may fall the other way once where two scores are a rounding apart"


@pytest.mark.parametrize("impl", [NATIVE])
def test_bf16_queries_beside_bf16_keys_choose_as_their_numbers_say(impl: Impl) -> None:
    inputs = step("mixed", RowKind.BF16, torch.bfloat16)
    assert differing_tokens(selected(inputs, impl), selected(inputs, "reference")) <= 2


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_a_rows_list_does_not_depend_on_its_step(kind: RowKind, impl: Impl) -> None:
    queries, weights, region, batch = step("mixed", kind)
    together = selected((queries, weights, region, batch), impl)
    config = GlmConfig.from_checkpoint(TINY)
    for span in batch.spans:
        for row in {span.row_start, span.row_end - 1}:
            position = int(batch.positions[row])
            table = [BlockId(block) for block in batch.block_tables[span.sequence].tolist()]
            piece = SequenceSlice(sequence_id=SequenceId("alone"), tokens=[1], start=position, block_table=table)
            alone = build_batch(StepPlan(step_number=0, slices=(piece,)), config, block_size_tokens=64, num_blocks=BLOCKS, row_tile=1)
            lists = selected((queries[row : row + 1], weights[row : row + 1], region, alone), impl)
            assert torch.equal(lists[0], together[row]), f"row {row}"


@pytest.mark.parametrize("impl", ["reference", *SERVING])
def test_a_step_of_short_contexts_reads_neither_queries_nor_keys(impl: Impl) -> None:
    region = poisoned_region(WIDTH, num_blocks=4)
    config = GlmConfig.from_checkpoint(TINY)
    piece = SequenceSlice(sequence_id=SequenceId("a"), tokens=[1] * 64, start=0, block_table=[BlockId(2)])
    batch = build_batch(StepPlan(step_number=0, slices=(piece,)), config, block_size_tokens=64, num_blocks=4, row_tile=1)
    lists = selected((torch.full((64, HEADS, WIDTH), torch.nan), torch.full((64, HEADS), torch.nan), region, batch), impl)
    assert torch.equal(lists, torch.where(torch.arange(64) <= torch.arange(64)[:, None], torch.arange(64), -1))


def test_refuses_lists_that_it_cannot_write() -> None:
    queries, weights, region, batch = step("decode", RowKind.BF16)
    options = {"gemm": Gemm(), "scratch_bytes": 1}
    with pytest.raises(ValueError, match="lists are 63 wide; topk is 64"):
        index_select(queries, weights, region, batch, TOPK, lists=torch.zeros(len(queries), 63, dtype=torch.int64), **options)
    with pytest.raises(ValueError, match=r"lists is torch\.int32"):
        index_select(queries, weights, region, batch, TOPK, lists=torch.zeros(len(queries), 64, dtype=torch.int32), **options)


@pytest.mark.parametrize("impl", ["reference", *SERVING])
def test_block_tables_may_be_part_of_wider_ones(impl: Impl) -> None:
    queries, weights, region, batch = step("decode", RowKind.BF16)
    wider = torch.nn.functional.pad(batch.block_tables, (0, 3), value=1 << 40)
    strided = dataclasses.replace(batch, block_tables=wider[:, : batch.block_tables.shape[1]])
    assert torch.equal(selected((queries, weights, region, strided), impl), selected((queries, weights, region, batch), impl))
