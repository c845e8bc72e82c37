"""Rows that travel to their experts, over real ranks: every row gets the sum that one process would compute."""

import pytest
import torch
from torch import Tensor

from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.expert import ExpertPlacement, dispatch_experts, find_placement
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from tests.rank_pool import RankPool

HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 24, 8, 3


def experts() -> Tensor:
    """[experts, hidden, hidden] of small integers: their products and sums are exact in fp32, in any order."""
    return torch.randint(-2, 3, (NUM_EXPERTS, HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(1)).float()


def rows_of_rank(rank: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    rows = torch.randint(-3, 4, (num_rows, HIDDEN), generator=generator).float()
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :NUM_CHOSEN].contiguous()
    return rows, chosen, torch.randint(1, 5, (num_rows, NUM_CHOSEN), generator=generator) / 4.0


def apply(weights: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    """Gated sum over the row's experts, those that are not absent."""
    total = torch.zeros(rows.shape[0], HIDDEN)
    for row in range(rows.shape[0]):
        for slot, gate in zip(slots[row].tolist(), gates[row].tolist(), strict=True):
            if slot >= 0:
                total[row] += gate * (rows[row] @ weights[slot])
    return total


def dispatched(context: ParallelContext, num_rows: list[int], placement: ExpertPlacement) -> tuple[Tensor, int, int]:
    """This rank's result, the rows that were computed here, and bytes that it has sent."""
    own = experts()[list(placement.slots[context.rank])]
    computed = 0

    def run(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
        nonlocal computed
        computed += rows.shape[0]
        assert (slots >= 0).any(dim=1).all(), "a row comes for at least one expert"
        return apply(own, rows, slots, gates)

    context.meter.clear()
    result = dispatch_experts(*rows_of_rank(context.rank, num_rows[context.rank]), placement, context.world, run)
    return result, computed, context.meter.bytes_sent[GroupKind.WORLD, Operation.ALL_TO_ALL]


@pytest.mark.parametrize(
    ("num_rows", "placement"),
    [
        ([5, 7], ExpertPlacement.even(NUM_EXPERTS, 2)),
        ([0, 9], ExpertPlacement.even(NUM_EXPERTS, 2)),
        ([0, 0], ExpertPlacement.even(NUM_EXPERTS, 2)),
        ([4, 1, 0, 6], ExpertPlacement.even(NUM_EXPERTS, 4)),
        ([4, 1, 2, 6], find_placement([9.0, 5.0, *[1.0] * 6], 4, 3)),
    ],
)
def test_every_row_meets_all_its_experts(rank_pool: RankPool, num_rows: list[int], placement: ExpertPlacement) -> None:
    results = rank_pool.run(ParallelLayout(dp_size=len(num_rows), is_expert_parallel=True), dispatched, num_rows, placement)
    parcels = 0
    for rank, (result, _, _) in enumerate(results):
        rows, chosen, gates = rows_of_rank(rank, num_rows[rank])
        assert torch.equal(result, apply(experts(), rows, chosen, gates))
        ranks, _ = placement.choose(chosen.numpy(), rank)
        parcels += sum(len(set(row)) for row in ranks.tolist())
    assert sum(computed for _, computed, _ in results) == parcels, "a row goes once to each rank that has an expert of its"


def test_bytes_are_those_of_the_rows_that_leave(rank_pool: RankPool) -> None:
    num_rows, placement = [5, 7], ExpertPlacement.even(NUM_EXPERTS, 2)
    results = rank_pool.run(ParallelLayout(dp_size=2, is_expert_parallel=True), dispatched, num_rows, placement)
    leaving = [
        sum(1 - rank in row for row in placement.choose(rows_of_rank(rank, num_rows[rank])[1].numpy(), rank)[0].tolist())
        for rank in range(2)
    ]
    for rank, (_, _, sent) in enumerate(results):
        out, back = leaving[rank] * 4 * (HIDDEN + 2 * NUM_CHOSEN), leaving[1 - rank] * 4 * HIDDEN
        assert sent == out + back + 8, "rows with numbers and gates, sums, and one count"
