"""What is counted is what is handed to the library: by an exchange that adds up, with ranks that all give the same."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from glm_runtime.parallel.collectives import ONE_EXCHANGE_BYTES, Collectives, CommunicationMeter, Operation, part_numel, reduced_bytes
from glm_runtime.parallel.layout import GroupKind

SIZES = (2, 3, 4, 8)


class AddingExchange:
    """`Exchange` among ranks that all give what this one gives. bytes_sent: what has left this rank for others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent = 0

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]) -> None:
        sizes = sent_sizes or [sent.numel() // self.size] * self.size
        assert sum(sizes) == sent.numel(), "every byte has a destination"
        assert sum(received_sizes or sizes) == received.numel(), "every byte has a place"
        self.bytes_sent += sent.numel() - sizes[self.rank]
        received.copy_(sent.split(list(sizes))[self.rank].repeat(self.size))

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        assert received.numel() == self.size * sent.numel(), "every rank's bytes have a place"
        self.bytes_sent += (self.size - 1) * sent.numel()
        received.copy_(sent.repeat(self.size))

    def broadcast(self, buffer: Tensor, root: int) -> None:
        self.bytes_sent += (self.size - 1) * buffer.numel() if self.rank == root else 0


CALLS: dict[str, Callable[[Collectives], object]] = {
    "gather": lambda group: group.all_gather(torch.ones(3, 5)),
    "gather no rows": lambda group: group.all_gather(torch.ones(0, 5)),
    "swap": lambda group: group.all_to_all(torch.ones(group.size, 3, 5, dtype=torch.bfloat16)),
    "rows": lambda group: group.all_to_all_rows(torch.ones(2 * group.size, 7), [2] * group.size, [2] * group.size),
    "no rows": lambda group: group.all_to_all_rows(torch.ones(0, 7), [0] * group.size, [0] * group.size),
    "small sum": lambda group: group.all_reduce(torch.ones(3, 5)),
    "no sum": lambda group: group.all_reduce(torch.ones(0, 5)),
    "large sum": lambda group: group.all_reduce(torch.ones(ONE_EXCHANGE_BYTES + 1, dtype=torch.bfloat16)),
    "scatter": lambda group: group.reduce_scatter(torch.ones(group.size, 3)),
    "broadcast from here": lambda group: group.broadcast(torch.ones(9), group.rank),
    "broadcast from elsewhere": lambda group: group.broadcast(torch.ones(9), group.rank ^ 1),
    "bytes": lambda group: group.broadcast_bytes(b"abcdefg", group.rank),
    "barrier": lambda group: group.barrier(),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_the_meter_counts_the_bytes_that_leave(name: str, size: int) -> None:
    for rank in (0, size - 1 - size % 2):
        exchange, meter = AddingExchange(rank, size), CommunicationMeter()
        CALLS[name](Collectives(GroupKind.TENSOR, rank, size, exchange, meter))
        assert sum(meter.bytes_sent.values()) == exchange.bytes_sent
        assert sum(meter.calls.values()) == (2 if name == "bytes" else 1)


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_equal_ranks_are_multiples(size: int) -> None:
    group = Collectives(GroupKind.WORLD, 0, size, AddingExchange(0, size), CommunicationMeter())
    for count in (0, 1, 5, ONE_EXCHANGE_BYTES // 4, ONE_EXCHANGE_BYTES // 4 + 1, ONE_EXCHANGE_BYTES + 3):
        assert torch.equal(group.all_reduce(torch.ones(count)), torch.full((count,), float(size)))


def test_bytes_of_a_sum_written_out() -> None:
    """Whole tensors to all others up to 64 KiB; beyond it each rank's part to it, and its sum to all."""
    assert reduced_bytes(16 << 10, 4, 4) == 3 * (64 << 10)
    assert reduced_bytes((16 << 10) + 1, 4, 4) == 2 * 3 * ((4 << 10) + 1) * 4
    assert reduced_bytes(0, 4, 4) == 0
    assert part_numel(8, 4) == 2
    assert part_numel(9, 4) == 3


def test_a_meter_starts_again_from_zero() -> None:
    meter = CommunicationMeter()
    meter.count(GroupKind.DATA, Operation.BROADCAST, 5)
    meter.count(GroupKind.DATA, Operation.BROADCAST, 6)
    assert meter.calls == {(GroupKind.DATA, Operation.BROADCAST): 2}
    assert meter.bytes_sent == {(GroupKind.DATA, Operation.BROADCAST): 11}
    meter.clear()
    assert not meter.calls
    assert not meter.bytes_sent


def test_a_group_of_several_ranks_needs_a_library() -> None:
    with pytest.raises(AssertionError, match="has a library behind it"):
        Collectives(GroupKind.TENSOR, 0, 2, None, CommunicationMeter())
