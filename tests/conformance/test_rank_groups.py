"""Collectives over real gloo groups, and the pool of processes that these tests run on."""

import os
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from glm_runtime.parallel.collectives import (
    ONE_EXCHANGE_BYTES,
    CommunicationMeter,
    Operation,
    gathered_bytes,
    reduced_bytes,
    scattered_bytes,
)
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from tests.rank_pool import RankPool, RanksFailed

TWO = ParallelLayout(tp_size=2)
FOUR = ParallelLayout(tp_size=4)
SIX = ParallelLayout(tp_size=3, pcp_size=2)
SPREAD = ParallelLayout(tp_size=4, dp_size=2, dcp_size=2, is_expert_parallel=True)
Counts = dict[tuple[GroupKind, Operation], int]


def numbers(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank gives: of mixed size, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-3, 4, tuple(shape), generator=generator)).to(dtype)


def plain_sum(shape: Sequence[int], dtype: torch.dtype, size: int) -> Tensor:
    """One loop over ranks in order, in fp32, rounded once."""
    total = torch.zeros(*shape)
    for rank in range(size):
        total = total + numbers(rank, shape, dtype).float()
    return total.to(dtype)


def counted(meter: CommunicationMeter) -> tuple[Counts, Counts]:
    return dict(meter.calls), dict(meter.bytes_sent)


def reduce_all(context: ParallelContext, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[list[Tensor], Counts, Counts]:
    sums = [context.tensor.all_reduce(numbers(context.rank, shape, dtype)) for shape in shapes]
    return (sums, *counted(context.meter))


SHAPES = {
    "none": (0, 16),
    "one": (1,),
    "few rows": (3, 16),
    "largest of one exchange": (ONE_EXCHANGE_BYTES // 4,),
    "smallest of two exchanges": (ONE_EXCHANGE_BYTES // 2 + 1,),
    "not divisible": (ONE_EXCHANGE_BYTES + 7,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", [TWO, FOUR, ParallelLayout(tp_size=8)], ids=lambda layout: layout.describe())
def test_a_sum_has_the_bits_of_a_plain_loop_on_every_rank(rank_pool: RankPool, layout: ParallelLayout, dtype: torch.dtype) -> None:
    shapes = tuple(SHAPES.values())
    expected = [plain_sum(shape, dtype, layout.tp_size) for shape in shapes]
    bytes_sent = sum(reduced_bytes(total.numel(), total.element_size(), layout.tp_size) for total in expected)
    for sums, calls, sent in rank_pool.run(layout, reduce_all, shapes, dtype):
        for name, found, total in zip(SHAPES, sums, expected, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, total), name
        assert calls == {(GroupKind.TENSOR, Operation.ALL_REDUCE): len(shapes)}
        assert sent == {(GroupKind.TENSOR, Operation.ALL_REDUCE): bytes_sent}


def reduce_in_two_shapes(context: ParallelContext, rows: int, width: int) -> tuple[Tensor, Tensor]:
    whole = numbers(context.rank, (rows, width))
    return context.tensor.all_reduce(whole[:1].contiguous()), context.tensor.all_reduce(whole)[:1]


def test_a_row_has_the_same_sum_alone_and_among_many(rank_pool: RankPool) -> None:
    """The batch decides which way of summing is taken; the bits may not tell."""
    for alone, among in rank_pool.run(FOUR, reduce_in_two_shapes, 300, 256):
        assert torch.equal(alone, among)


def exchange(context: ParallelContext) -> tuple[dict[str, Tensor], Counts, Counts]:
    group, rank = context.tensor, context.rank
    parts = torch.arange(group.size * 6, dtype=torch.float32).view(group.size, 2, 3) + 1000 * rank
    root = torch.full((5,), rank, dtype=torch.int32)
    found = {
        "gather": group.all_gather(parts[0].contiguous()),
        "swap": group.all_to_all(parts),
        "scatter": group.reduce_scatter(parts),
        "broadcast": group.broadcast(root, root=1),
        "gather no rows": group.all_gather(torch.empty(0, 3)),
        "swap no rows": group.all_to_all(torch.empty(group.size, 0, 3)),
    }
    group.barrier()
    return (found, *counted(context.meter))


def test_gather_swap_scatter_and_broadcast(rank_pool: RankPool) -> None:
    size = FOUR.tp_size
    given = [torch.arange(size * 6, dtype=torch.float32).view(size, 2, 3) + 1000 * rank for rank in range(size)]
    for rank, (found, calls, sent) in enumerate(rank_pool.run(FOUR, exchange)):
        assert torch.equal(found["gather"], torch.stack([parts[0] for parts in given]))
        assert torch.equal(found["swap"], torch.stack([parts[rank] for parts in given]))
        assert torch.equal(found["scatter"], sum(parts[rank] for parts in given))
        assert found["broadcast"].tolist() == [1] * 5
        assert found["gather no rows"].shape == (size, 0, 3)
        assert found["swap no rows"].shape == (size, 0, 3)
        tensor = GroupKind.TENSOR
        assert calls == {
            (tensor, Operation.ALL_GATHER): 3,
            (tensor, Operation.ALL_TO_ALL): 2,
            (tensor, Operation.REDUCE_SCATTER): 1,
            (tensor, Operation.BROADCAST): 1,
        }
        assert sent == {
            (tensor, Operation.ALL_GATHER): gathered_bytes(24, size) + gathered_bytes(1, size),
            (tensor, Operation.ALL_TO_ALL): scattered_bytes(96, size),
            (tensor, Operation.REDUCE_SCATTER): scattered_bytes(96, size),
            (tensor, Operation.BROADCAST): 3 * 20 if rank == 1 else 0,
        }


def send_rows(context: ParallelContext, counts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Counts]:
    group, rank = context.world, context.rank
    sent = [torch.full((count, width), 10.0 * rank + other) for other, count in enumerate(counts[rank])]
    received = [counts[other][rank] for other in range(group.size)]
    return group.all_to_all_rows(torch.cat(sent), counts[rank], received), dict(context.meter.bytes_sent)


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 0, 3], [0, 0, 0, 0], [5, 1, 2, 2], [0, 7, 0, 1]],
        [[0] * 4] * 4,
    ],
    ids=["uneven", "nothing"],
)
def test_uneven_rows_arrive_in_order_of_ranks(rank_pool: RankPool, counts: list[list[int]]) -> None:
    for rank, (rows, sent) in enumerate(rank_pool.run(FOUR, send_rows, counts, 3)):
        expected = [10.0 * other + rank for other in range(4) for _ in range(counts[other][rank])]
        assert rows.shape == (len(expected), 3)
        assert rows[:, 0].tolist() == expected
        assert sent == {(GroupKind.WORLD, Operation.ALL_TO_ALL): 12 * (sum(counts[rank]) - counts[rank][rank])}


def tell(context: ParallelContext, data: Sequence[bytes], root: int) -> list[bytes]:
    return [context.tensor.broadcast_bytes(each if context.rank == root else b"ignored", root) for each in data]


def test_bytes_of_any_length_come_from_the_root(rank_pool: RankPool) -> None:
    data = [b"", b"x", bytes(range(256)) * 1000]
    for root in (0, 3):
        assert rank_pool.run(FOUR, tell, data, root) == [data] * 4


def meet(context: ParallelContext) -> dict[GroupKind, list[int]]:
    own = torch.tensor([context.rank])
    return {kind: group.all_gather(own).flatten().tolist() for kind, group in context.groups.items()}


@pytest.mark.parametrize("layout", [SIX, SPREAD], ids=lambda layout: layout.describe())
def test_every_group_has_the_members_of_the_layout_in_order(rank_pool: RankPool, layout: ParallelLayout) -> None:
    for rank, met in enumerate(rank_pool.run(layout, meet)):
        assert met == {kind: list(layout.members(kind, rank)) for kind in GroupKind}


def test_one_rank_exchanges_and_counts_nothing() -> None:
    context = one_rank()
    x = torch.arange(6.0).view(1, 2, 3)
    for group in context.groups.values():
        assert group.all_reduce(x) is x
        assert group.all_gather(x).shape == (1, 1, 2, 3)
        assert group.all_to_all(x) is x
        assert group.all_to_all_rows(x, [1], [1]) is x
        assert torch.equal(group.reduce_scatter(x), x[0])
        assert group.broadcast(x) is x
        assert group.broadcast_bytes(b"abc") == b"abc"
        group.barrier()
    assert counted(context.meter) == ({}, {})


def fail_alone(context: ParallelContext, rank: int) -> None:
    if context.rank == rank:
        raise ValueError("no such thing")
    context.tensor.barrier()


def own_process(context: ParallelContext) -> tuple[int, int]:
    context.tensor.barrier()
    return os.getpid(), torch.get_num_threads()


def end_alone(context: ParallelContext, rank: int) -> None:
    if context.rank == rank:
        os._exit(7)
    context.tensor.barrier()


def hang_alone(context: ParallelContext, rank: int) -> None:
    if context.rank == rank:
        time.sleep(600)


def fail_together(context: ParallelContext) -> None:
    context.tensor.barrier()
    raise KeyError(context.rank)


class TestPool:
    def test_its_processes_are_reused(self, rank_pool: RankPool) -> None:
        first = rank_pool.run(TWO, own_process)
        again = rank_pool.run(FOUR, own_process)
        assert again[:2] == first
        assert len({process for process, _ in again}) == 4
        assert {threads for _, threads in again} == {1}

    def test_a_rank_that_raises_is_reported_with_its_traceback_and_harms_nobody(self, rank_pool: RankPool) -> None:
        with pytest.raises(RanksFailed) as caught:
            rank_pool.run(TWO, fail_alone, 1)
        first, *_ = caught.value.errors
        assert first == 1
        assert caught.value.errors[1].kind == "ValueError"
        assert 'raise ValueError("no such thing")' in str(caught.value)
        assert len(rank_pool.run(TWO, own_process)) == 2

    def test_a_rank_that_dies_is_reported_and_replaced(self, rank_pool: RankPool) -> None:
        with pytest.raises(RanksFailed, match="exit code 7"):
            rank_pool.run(TWO, end_alone, 0)
        assert len(rank_pool.run(FOUR, own_process)) == 4

    def test_a_rank_that_is_late_is_ended_and_replaced(self, rank_pool: RankPool) -> None:
        with pytest.raises(RanksFailed) as caught:
            rank_pool.run(TWO, hang_alone, 1, timeout_s=0.5)
        assert caught.value.errors[1].message == "late"
        assert len(rank_pool.run(TWO, own_process)) == 2

    def test_ranks_that_fail_together_are_kept(self, rank_pool: RankPool) -> None:
        before = rank_pool.run(TWO, own_process)
        with pytest.raises(RanksFailed) as caught:
            rank_pool.run(TWO, fail_together)
        assert {error.kind for error in caught.value.errors.values()} == {"KeyError"}
        assert rank_pool.run(TWO, own_process) == before
