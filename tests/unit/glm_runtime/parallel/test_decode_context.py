"""Whose token is whose when ranks share a cache: every token has one place, and every number is found again."""

import numpy as np
import pytest
import torch

from glm_runtime.config import GlmConfig
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.decode_context import BlockShare, group_block, home_of, local_block
from glm_runtime.step_batch import StepBatch
from kv_transfer.identity import BlockId, SequenceId
from tests.glm_checkpoints import TINY

SIZES = (1, 2, 3, 4, 8)
BLOCK_SIZES = (1, 2, 3, 4, 16)


def owned(length: int, share: BlockShare) -> list[int]:
    """By counting: tokens of a sequence that lie on a rank, in order."""
    return [token for token in range(length) if token // share.block_size_tokens % share.size == share.rank]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_lengths_and_positions_are_those_of_counting(size: int, block_size: int) -> None:
    lengths = np.arange(4 * size * block_size + 3)
    for rank in range(size):
        share = BlockShare(rank, size, block_size)
        counted = [owned(int(length), share) for length in lengths]
        assert share.local_lengths(lengths).tolist() == [len(tokens) for tokens in counted]
        longest = counted[-1]
        assert share.global_tokens(torch.arange(len(longest))).tolist() == longest
    assert sum(BlockShare(rank, size, block_size).local_lengths(lengths) for rank in range(size)).tolist() == lengths.tolist()


def test_no_token_stays_none() -> None:
    assert BlockShare(1, 2, 4).global_tokens(torch.tensor([[0, 4, -1], [-1, 3, 5]])).tolist() == [[4, 12, -1], [-1, 7, 13]]


def test_the_specifications_example() -> None:
    """FACTS 6.4 with I = 64: of 1,000 tokens on 4 ranks rank 3 has the last, 40 tokens long block."""
    assert [int(BlockShare(rank, 4).local_lengths(np.array(1000))) for rank in range(4)] == [256, 256, 256, 232]


@pytest.mark.parametrize("size", SIZES)
def test_a_group_wide_block_is_one_block_of_one_rank(size: int) -> None:
    places = [(home_of(block, size), local_block(block, size)) for block in range(6 * size)]
    assert len(set(places)) == 6 * size
    assert [group_block(local, home, size) for home, local in places] == list(range(6 * size))


def table(num_blocks: int, size: int, seed: int = 0) -> list[BlockId]:
    """Any blocks in a pool of 40 a rank, block i with home i % size."""
    generator = torch.Generator().manual_seed(seed)
    locals_ = torch.randperm(40, generator=generator).tolist()
    return [group_block(locals_[number], number % size, size) for number in range(num_blocks)]


def test_a_rank_reads_every_sizeth_entry_of_a_table() -> None:
    given = [BlockId(block) for block in (8, 5, 2, 7, 0)]  # homes 0, 1, 2, 3, 0 of 4
    assert BlockShare(0, 4).local_table(given, 0).tolist() == [2, -1, -1, -1, 0]
    assert BlockShare(1, 4).local_table(given, 0).tolist() == [-1, 1, -1, -1, -1]
    assert BlockShare(2, 4).local_table(given[2:], 2).tolist() == [0, -1, -1]


def test_a_block_at_another_ranks_place_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="block 1 and those after it"):
        BlockShare(0, 2).local_table([BlockId(2), BlockId(4)], 1)


def batch_of(share: BlockShare, *pieces: SequenceSlice, topk: int = 64) -> StepBatch:
    config = GlmConfig.from_checkpoint(TINY)
    assert config.index_topk == topk
    num_blocks = 40 * share.size
    tables = BlockTables(num_blocks, share)
    plan = StepPlan(step_number=0, slices=pieces)
    return build_batch(plan, config, block_size_tokens=share.block_size_tokens, num_blocks=num_blocks, row_tile=4, tables=tables)


def mixed_step(size: int, block_size: int) -> list[SequenceSlice]:
    return [
        SequenceSlice(
            sequence_id=SequenceId(str(number)),
            tokens=[1] * rows,
            start=start,
            block_table=table(-(-(start + rows) // block_size), size, number),
        )
        for number, (start, rows) in enumerate([(60, 70), (200, 1), (63, 3), (0, 10), (500, 6)])
    ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("block_size", [16, 64])
def test_every_row_is_stored_once_and_rows_see_their_own_tokens(size: int, block_size: int) -> None:
    whole = batch_of(BlockShare(0, 1, block_size), *mixed_step(1, block_size))
    pieces = mixed_step(size, block_size)
    parts = [batch_of(BlockShare(rank, size, block_size), *pieces) for rank in range(size)]
    stored = torch.stack([part.slots for part in parts])
    assert ((stored >= 0).sum(0) == (whole.slots >= 0)).all(), "each row on one rank, padding on none"
    assert (stored >= -1).all()
    for rank, part in enumerate(parts):
        assert part.visible.tolist() == whole.visible.tolist()
        assert part.share is not None
        rows, local = part.share.rows, part.share.batch
        assert sorted(rows.tolist()) == [row for row in range(whole.num_rows) if whole.visible[row] > 64]
        share = BlockShare(rank, size, block_size)
        assert local.visible.tolist() == [len(owned(int(whole.visible[row]), share)) for row in rows]
        assert local.row_sequences.tolist() == whole.row_sequences[rows].tolist()
        covered = torch.cat([rectangle.rows.flatten() for rectangle in local.scored])
        assert covered.tolist() == list(range(len(rows)))
        last = torch.cat([rectangle.positions.flatten() for rectangle in local.scored])
        assert (last + 1).tolist() == local.visible.tolist()
        for row, sequence, visible in zip(rows.tolist(), local.row_sequences.tolist(), local.visible.tolist(), strict=True):
            places = [local.block_tables[sequence, token // block_size] * block_size + token % block_size for token in range(visible)]
            slots = [pieces[sequence].block_table[token // block_size] // size * block_size + token % block_size
                     for token in owned(int(whole.visible[row]), share)]  # fmt: skip
            assert places == slots


def test_a_step_without_rows_to_score_has_no_share() -> None:
    piece = SequenceSlice(sequence_id=SequenceId("a"), tokens=[1] * 64, start=0, block_table=table(4, 2))
    assert batch_of(BlockShare(1, 2, 16), piece).share is None
