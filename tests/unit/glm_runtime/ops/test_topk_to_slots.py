"""From logical lists to cache addresses: block edges, padding, what lies outside."""

import pytest
import torch

from glm_runtime.ops.impl import Impl
from glm_runtime.ops.topk_to_slots import topk_to_slots
from glm_runtime.paged_cache import CacheRegion
from tests.unit.glm_runtime.ops.pools import NATIVE, poisoned_region

ALL = ["reference", "cpu", NATIVE]


def converted(
    lists: torch.Tensor, sequences: torch.Tensor, tables: torch.Tensor, region: CacheRegion, impl: Impl
) -> tuple[torch.Tensor, torch.Tensor]:
    addresses, counts = torch.full_like(lists, -77), torch.full((lists.shape[0],), -77)
    topk_to_slots(lists, sequences, tables, region, addresses=addresses, counts=counts, impl=impl)
    return addresses, counts


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("encoding", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_an_address_is_where_the_tokens_row_starts(block_size: int, encoding: str, impl: Impl) -> None:
    """Rows are told apart by what lies at their address, in a pool whose blocks are longer than the region."""
    region = poisoned_region(24, block_size=block_size, encoding=encoding)
    tables = torch.tensor([[7, 3, 0], [39, 1, 5]])
    tokens = torch.tensor([[0, 1, block_size - 1, block_size, 2 * block_size + 3], [block_size, 2 * block_size, -1, -1, -1]])
    sequences = torch.tensor([1, 0])
    for row, sequence in enumerate(sequences.tolist()):
        for column, token in enumerate(tokens[row].tolist()):
            if token >= 0:
                region.planes[0][tables[sequence, token // block_size], token % block_size] = torch.tensor(8.0 * row + column).to(
                    region.planes[0].dtype
                )
    addresses, counts = converted(tokens, sequences, tables, region, impl)
    assert counts.tolist() == [5, 2]
    for row in range(2):
        for column in range(5):
            if tokens[row, column] < 0:
                assert addresses[row, column] == -1
            else:
                assert (region.rows[addresses[row, column]].float() == 8.0 * row + column).all()


@pytest.mark.parametrize("impl", ALL)
def test_what_is_behind_the_table_or_outside_the_pool_becomes_padding(impl: Impl) -> None:
    region = poisoned_region(24, num_blocks=10)
    lists = torch.tensor([[127, 128, 2**40, -1, -5], [3, 64, 65, 0, 100]])
    addresses, counts = converted(lists, torch.tensor([0, 1]), torch.tensor([[2, 9], [10, -3]]), region, impl)
    assert addresses[0].tolist() == [region.addresses(torch.tensor(9 * 64 + 63)).item(), -1, -1, -1, -1]
    assert addresses[1].tolist() == [-1] * 5
    assert counts.tolist() == [1, 0]


@pytest.mark.parametrize("impl", ["cpu", NATIVE])
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (33, 257)])
def test_equals_reference(rows: int, width: int, impl: Impl) -> None:
    generator = torch.Generator().manual_seed(rows)
    region = poisoned_region(576, encoding="nvfp4_ds_mla")
    tables = torch.randint(0, 40, (3, 5), generator=generator)
    lists = torch.randint(-40, 360, (rows, width), generator=generator)
    sequences = torch.randint(0, 3, (rows,), generator=generator)
    for actual, expected in zip(
        converted(lists, sequences, tables, region, impl), converted(lists, sequences, tables, region, "reference"), strict=True
    ):
        assert torch.equal(actual, expected)


def test_refuses_buffers_that_it_cannot_write() -> None:
    region, lists, row = poisoned_region(24), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    tables = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"addresses has shape \[2, 4\]"):
        topk_to_slots(lists, row, tables, region, addresses=torch.zeros(2, 4, dtype=torch.int64), counts=row)
    with pytest.raises(ValueError, match=r"addresses is torch\.int64 with strides"):
        topk_to_slots(lists, row, tables, region, addresses=torch.zeros(3, 2, dtype=torch.int64).t(), counts=row)
    with pytest.raises(ValueError, match=r"counts is torch\.int32"):
        topk_to_slots(lists, row, tables, region, addresses=lists, counts=row.int())
