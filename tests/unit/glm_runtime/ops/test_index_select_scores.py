"""The selection with scores, and what it is for: ranks that choose among their own tokens find, together, what one would have found."""

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.linear import Gemm
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS
from glm_runtime.ops.index_select import index_select
from glm_runtime.ops.merge_topk import merge_topk
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.parallel.decode_context import BlockShare, group_block
from glm_runtime.row_format import RowKind
from glm_runtime.step_batch import StepBatch, group_scored_rows
from kv_transfer.identity import BlockId, SequenceId
from tests.glm_checkpoints import TINY
from tests.unit.glm_runtime.ops.pools import NATIVE, fill, poisoned_region
from tests.unit.glm_runtime.ops.test_index_select import KINDS, TOPK, step

IMPLS = ["reference", "cpu", NATIVE]


def with_scores(
    queries: Tensor, weights: Tensor, region: CacheRegion, batch: StepBatch, impl: Impl, scratch: int = 1
) -> tuple[Tensor, Tensor]:
    lists = torch.full((queries.shape[0], TOPK), 12345)
    scores = torch.full(lists.shape, torch.nan)
    index_select(queries, weights, region, batch, TOPK, lists=lists, scores=scores, gemm=Gemm(16), scratch_bytes=scratch, impl=impl)
    return lists, scores


def all_scored(batch: StepBatch) -> StepBatch:
    """The same step with every row in a rectangle."""
    size = 64
    tables = batch.block_tables.numpy()
    scored = group_scored_rows(batch.spans, tables, index_topk=0, block_size_tokens=size, tile_blocks=KEY_TILE_TOKENS // size)
    return dataclasses.replace(batch, scored=scored)


@cache
def referenced(name: str, kind: RowKind) -> tuple[Tensor, Tensor]:
    queries, weights, region, batch = step(name, kind)
    return with_scores(queries, weights, region, all_scored(batch), "reference")


@pytest.mark.parametrize("impl", ["cpu", NATIVE])
@pytest.mark.parametrize(("kind", "scratch_bytes"), [(kind, 1 << 25 * (place % 2)) for place, kind in enumerate(KINDS)], ids=str)
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_scores_are_those_of_the_listed_tokens(name: str, kind: RowKind, scratch_bytes: int, impl: Impl) -> None:
    queries, weights, region, batch = step(name, kind)
    batch = all_scored(batch)
    lists, scores = with_scores(queries, weights, region, batch, impl, scratch_bytes)
    expected, expected_scores = referenced(name, kind)
    is_same = (lists == expected).all(1)
    assert (~is_same).sum() <= 2, "a boundary may fall the other way where two scores are a rounding apart"
    assert (scores[lists < 0] == float("-inf")).all()
    listed = (lists >= 0) & is_same[:, None]
    assert torch.allclose(scores[listed], expected_scores[listed], rtol=1e-5, atol=1e-4)
    lists_alone = torch.full(lists.shape, 12345)
    index_select(queries, weights, region, batch, TOPK, lists=lists_alone, gemm=Gemm(16), scratch_bytes=scratch_bytes, impl=impl)
    assert torch.equal(lists_alone, lists), "scores change no list"


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_of_damage_and_of_zeros(impl: Impl) -> None:
    """One head, one-dimensional keys as it were: a NaN key scores NaN, a row of padding nothing, -0 is 0."""
    region = poisoned_region(32, num_blocks=4, encoding="fp32")
    keys = torch.zeros(70, 32)
    keys[:, 0] = torch.arange(70.0) - 35
    keys[3, 0] = torch.nan
    fill(region, torch.tensor([2, 0]), keys)
    piece = SequenceSlice(sequence_id=SequenceId("a"), tokens=[1] * 3, start=3, block_table=[BlockId(2), BlockId(0)])
    config = GlmConfig.from_checkpoint(TINY)
    batch = build_batch(StepPlan(step_number=0, slices=(piece,)), config, block_size_tokens=64, num_blocks=4, row_tile=4)
    queries = torch.zeros(4, 1, 32)
    queries[:, 0, 0] = -1.0
    lists, scores = with_scores(queries, torch.full((4, 1), -2.0), region, all_scored(batch), impl)
    assert lists[:, :7].tolist() == [[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1], [0, 1, 2, 3, 4, 5, -1], [-1] * 7]
    assert scores[0, :3].tolist() == [-70.0, -68.0, -66.0]
    assert scores[:3, 3].isnan().all()
    lists, scores = with_scores(-queries, torch.full((4, 1), -2.0), region, all_scored(batch), impl)
    assert scores[2, 4].view(torch.int32) == 0, "-0 becomes 0"


def test_refuses_scores_that_it_cannot_write() -> None:
    queries, weights, region, batch = step("decode", RowKind.BF16)
    lists = torch.zeros(len(queries), 64, dtype=torch.int64)
    for scores, says in ((torch.zeros(len(queries), 63), "scores has shape"), (torch.zeros(lists.shape).double(), r"torch\.float64")):
        with pytest.raises(ValueError, match=says):
            index_select(queries, weights, region, batch, TOPK, lists=lists, scores=scores, gemm=Gemm(), scratch_bytes=1)


# Ranks that share a cache.

HEADS, WIDTH = 3, 128
SHARED_STEPS = {
    "decode": [(700, 1), (65, 1), (64, 1), (63, 1), (3, 1), (511, 1), (512, 1), (128, 1)],
    "verify": [(60, 6), (126, 6), (250, 6), (65, 6), (1000, 6)],
    "chunk": [(0, 150), (300, 1)],
}


def shared_step(name: str, size: int, block_size: int) -> Iterator[tuple[CacheRegion, StepBatch]]:
    """The step on one rank, then on each of `size`: the same keys, small whole numbers, so that sums are exact and many scores tie."""
    generator = torch.Generator().manual_seed(7)
    keys = [torch.randint(-1, 2, (start + rows, WIDTH), generator=generator).float() for start, rows in SHARED_STEPS[name]]
    for share in (BlockShare(0, 1, block_size), *[BlockShare(rank, size, block_size) for rank in range(size)]):
        local = torch.Generator().manual_seed(share.size)
        free = torch.randperm(200, generator=local).tolist()
        region = poisoned_region(WIDTH, num_blocks=200, block_size=block_size, encoding="fp32")
        slices = []
        for number, ((start, rows), stored) in enumerate(zip(SHARED_STEPS[name], keys, strict=True)):
            blocks = [free.pop() for _ in range(-(-len(stored) // block_size))]
            table = [group_block(block, place % share.size, share.size) for place, block in enumerate(blocks)]
            own = share.global_tokens(torch.arange(int(share.local_lengths(torch.tensor(len(stored)).numpy()))))
            fill(region, torch.tensor(blocks[share.rank :: share.size] or [0]), stored[own])
            slices.append(SequenceSlice(sequence_id=SequenceId(str(number)), tokens=[1] * rows, start=start, block_table=table))
        tables = BlockTables(200 * share.size, share)
        plan, config = StepPlan(step_number=0, slices=tuple(slices)), GlmConfig.from_checkpoint(TINY)
        yield (
            region,
            build_batch(plan, config, block_size_tokens=block_size, num_blocks=200 * share.size, row_tile=1, tables=tables),
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("size", "block_size"), [(2, 64), (4, 16)])
@pytest.mark.parametrize("name", SHARED_STEPS)
def test_ranks_together_choose_what_one_would(name: str, size: int, block_size: int, impl: Impl) -> None:
    (region, whole), *ranks = shared_step(name, size, block_size)
    generator = torch.Generator().manual_seed(3)
    queries = torch.randint(-1, 2, (whole.num_rows, HEADS, WIDTH), generator=generator).float()
    weights = torch.randint(-1, 3, (whole.num_rows, HEADS), generator=generator).float()
    expected = torch.full((whole.num_rows, TOPK), 12345)
    index_select(queries, weights, region, whole, TOPK, lists=expected, gemm=Gemm(), scratch_bytes=1 << 20, impl="reference")
    found_scores, found_tokens = [], []
    for rank, (region, batch) in enumerate(ranks):
        share = batch.share
        assert share is not None
        lists, scores = with_scores(queries[share.rows], weights[share.rows], region, share.batch, impl, 1 << 20)
        found_scores.append(scores)
        found_tokens.append(BlockShare(rank, size, block_size).global_tokens(lists))
        rows = share.rows
    chosen = merge_topk(torch.stack(found_scores), torch.stack(found_tokens), TOPK)
    assert torch.equal(chosen, expected[rows]), "the same set, ties included"
    assert sorted(rows.tolist()) == (whole.visible > TOPK).nonzero().flatten().tolist()
