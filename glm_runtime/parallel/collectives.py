"""What ranks of one group exchange, and how much: the only module that calls a communication library on the path of a step.

Every operation is the same on every rank and given in the same order by all. Sums run over ranks in ascending order, in fp32, so a
result does not depend on how many rows there are or where an element lies. `CommunicationMeter` counts calls and the bytes that this
rank sends to others; `cluster/planner/communication.py` says what they must be.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Protocol

import torch
from torch import Tensor

from glm_runtime.parallel.layout import GroupKind

ONE_EXCHANGE_BYTES = 64 << 10
"""Up to this size a sum is one exchange of whole tensors; beyond it each rank sums a part and sends that on: fewer bytes, two exchanges."""


@unique
class Operation(Enum):
    """Kinds of exchange, as they are counted."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"

    __hash__ = object.__hash__


@dataclass(slots=True)
class CommunicationMeter:
    """calls, bytes_sent: by (group, operation), since the start. Bytes that stay on this rank are not counted.

    seconds: that this rank spent in exchanges, waiting for later ranks included; on CUDA only what it takes to start them.
    """

    calls: dict[tuple[GroupKind, Operation], int] = field(default_factory=dict)
    bytes_sent: dict[tuple[GroupKind, Operation], int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, kind: GroupKind, operation: Operation, num_bytes: int) -> None:
        """One call that sends `num_bytes` to other ranks."""
        key = (kind, operation)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes_sent[key] = self.bytes_sent.get(key, 0) + num_bytes

    def clear(self) -> None:
        """Count from zero."""
        self.calls.clear()
        self.bytes_sent.clear()
        self.seconds = 0.0


class Exchange(Protocol):
    """A communication library's group. Buffers are contiguous bytes (uint8, one dimension) on the device of the ranks."""

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]) -> None:
        """Part j of `sent` goes to rank j, part i of `received` comes from rank i. Sizes in bytes; empty means equal parts."""

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """`received` is every rank's `sent`, in order of ranks; all are equally long."""

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """`buffer` becomes that of rank `root` of the group."""


class Collectives:
    """One group as one rank sees it. size 1 exchanges nothing, counts nothing and returns its inputs.

    Tensors must be contiguous. When a rank is gone or late the library raises RuntimeError, which ends the step.
    """

    def __init__(self, kind: GroupKind, rank: int, size: int, exchange: Exchange | None, meter: CommunicationMeter) -> None:
        assert (exchange is None) == (size == 1), "a group of more than one rank has a library behind it"
        self.kind = kind
        self.rank = rank
        self.size = size
        self.meter = meter
        self._exchange: Any = exchange

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] of equal shape on all ranks to [size, ...], in order of ranks, new."""
        if self.size == 1:
            return x[None]
        self.meter.count(self.kind, Operation.ALL_GATHER, gathered_bytes(x.nbytes, self.size))
        return self._gather(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...]: x[j] goes to rank j; of the result, new, [i] comes from rank i."""
        if self.size == 1:
            return x
        assert x.shape[0] == self.size, f"{x.shape[0]} parts for {self.size} ranks"
        self.meter.count(self.kind, Operation.ALL_TO_ALL, scattered_bytes(x.nbytes, self.size))
        return self._swap(x)

    def all_to_all_rows(self, rows: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]) -> Tensor:
        """rows [N, ...], the first sent_counts[0] for rank 0 and so on. Returns what the ranks sent here, in their order, new."""
        if self.size == 1:
            return rows
        row_bytes = rows[:1].nbytes if rows.shape[0] else rows.element_size() * rows.shape[1:].numel()
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        own = sent_counts[self.rank] * row_bytes
        self.meter.count(self.kind, Operation.ALL_TO_ALL, sum(sent_counts) * row_bytes - own)
        self._timed(
            self._exchange.all_to_all,
            as_bytes(received),
            as_bytes(rows),
            [count * row_bytes for count in received_counts],
            [count * row_bytes for count in sent_counts],
        )
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, of x's shape and dtype, new. Rounds: once, from fp32."""
        if self.size == 1:
            return x
        self.meter.count(self.kind, Operation.ALL_REDUCE, reduced_bytes(x.numel(), x.element_size(), self.size))
        if x.nbytes <= ONE_EXCHANGE_BYTES:
            return ordered_sum(self._gather(x))
        flat, count = x.flatten(), part_numel(x.numel(), self.size)
        padded = torch.nn.functional.pad(flat, (0, count * self.size - flat.numel())).view(self.size, count)
        whole = self._gather(ordered_sum(self._swap(padded)))
        return whole.flatten()[: x.numel()].view(x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...]: the sum over ranks of x[rank], of x's dtype, new. Rounds: once, from fp32."""
        if self.size == 1:
            return x[0]
        self.meter.count(self.kind, Operation.REDUCE_SCATTER, scattered_bytes(x.nbytes, self.size))
        return ordered_sum(self._swap(x))

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """x becomes that of rank `root`, in place; returned for convenience."""
        if self.size > 1:
            self.meter.count(self.kind, Operation.BROADCAST, (self.size - 1) * x.nbytes if self.rank == root else 0)
            self._timed(self._exchange.broadcast, as_bytes(x), root)
        return x

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        """`data` of rank `root`, however long; what others give is not looked at. Two calls."""
        if self.size == 1:
            return data
        length = self.broadcast(torch.tensor([len(data)]), root)
        is_root = self.rank == root
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_root and data else torch.empty(int(length), dtype=torch.uint8)
        return bytes(self.broadcast(buffer, root).numpy()) if int(length) else b""

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8))

    def _timed(self, exchange: Callable[..., None], *arguments: Any) -> None:
        started_s = time.perf_counter()
        exchange(*arguments)
        self.meter.seconds += time.perf_counter() - started_s

    def _gather(self, x: Tensor) -> Tensor:
        received = x.new_empty(self.size, *x.shape)
        self._timed(self._exchange.all_gather, as_bytes(received), as_bytes(x))
        return received

    def _swap(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        self._timed(self._exchange.all_to_all, as_bytes(received), as_bytes(x), (), ())
        return received


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, one dimension, no copy."""
    assert x.is_contiguous(), "what is exchanged is contiguous"
    return x.view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def ordered_sum(parts: Tensor) -> Tensor:
    """[size, ...] to [...]: fp32 sum in order of the first axis, rounded once to the parts' dtype; new."""
    total = parts[0].float() + parts[1].float()
    for part in parts[2:]:
        total += part
    return total.to(parts.dtype)


def part_numel(numel: int, size: int) -> int:
    """Elements of the part that one rank sums, the last one's padding included."""
    return -(-numel // size)


def reduced_bytes(numel: int, itemsize: int, size: int) -> int:
    """Bytes that a rank sends in one sum."""
    if numel * itemsize <= ONE_EXCHANGE_BYTES:
        return gathered_bytes(numel * itemsize, size)
    return 2 * (size - 1) * part_numel(numel, size) * itemsize


def gathered_bytes(num_bytes: int, size: int) -> int:
    """Bytes that a rank sends when all get its `num_bytes`."""
    return (size - 1) * num_bytes


def scattered_bytes(num_bytes: int, size: int) -> int:
    """Bytes that a rank sends when `num_bytes` are equal parts for all ranks, its own included."""
    return num_bytes // size * (size - 1)
