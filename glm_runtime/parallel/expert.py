"""Expert parallelism: which rank has which expert, and how rows travel to the experts of other ranks and back.

Rows travel only where ranks compute different rows. A row goes once to every rank that has an expert of its, with the experts it takes
there and their gates; one sum comes back. Sums run over ranks in ascending order, so a row's bits do not depend on the other rows.
Source: FACTS 6.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_runtime.parallel.collectives import Collectives
from glm_runtime.parallel.layout import ParallelLayout

ABSENT = -1
"""Instead of an expert's number: none here."""

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [N, hidden], slots [N, k] int64 or ABSENT, gates [N, k] fp32) to the gated sum over the row's experts here, [N, hidden] fp32."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts the ranks have: slots[rank] are expert numbers, equally many on each rank, every expert at least once in all.

    An expert on several ranks (redundant, for load) is taken by turns: row t of a rank takes the ((t + rank) mod copies)-th of them.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert {expert for rank in self.slots for expert in rank} == set(range(self.num_experts)), "every expert has a place"
        assert len({len(rank) for rank in self.slots}) == 1, "ranks have equally many slots"
        assert all(len(set(rank)) == len(rank) for rank in self.slots), "a rank has an expert once"

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Neighbouring experts on one rank, none twice. Raises ValueError if the ranks do not divide the experts."""
        if num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts cannot be spread over {num_ranks} ranks")
        width = num_experts // num_ranks
        return cls(num_experts, tuple(tuple(range(rank * width, (rank + 1) * width)) for rank in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        """Ranks that have experts."""
        return len(self.slots)

    def here(self, chosen: Tensor, rank: int) -> Tensor:
        """Slots on `rank`, or ABSENT, of the experts [T, k] of rows that all ranks have: each is taken on one of them. [T, k] int64."""
        if self._slots_by_expert is not None:
            return self._slots_by_expert[rank][chosen]
        ranks, slots = self.choose(chosen.numpy(), 0)
        return torch.from_numpy(np.where(ranks == rank, slots, ABSENT))

    @cached_property
    def _slots_by_expert(self) -> Tensor | None:
        """[ranks, experts] slots or ABSENT, where every expert is once; else a row's turn decides."""
        if (self.copies > 1).any():
            return None
        table = torch.full((self.num_ranks, self.num_experts), ABSENT, dtype=torch.int64)
        for rank, experts in enumerate(self.slots):
            table[rank, torch.tensor(experts)] = torch.arange(len(experts))
        return table

    @cached_property
    def copies(self) -> NDArray[np.int64]:
        """[experts]: on how many ranks each is."""
        return np.bincount(np.array(self.slots).ravel(), minlength=self.num_experts)

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ranks and slots of each expert's copies, [experts, most copies]; what is beyond an expert's copies is never read."""
        ranks = np.zeros((self.num_experts, int(self.copies.max())), dtype=np.int64)
        slots = np.zeros_like(ranks)
        seen = np.zeros(self.num_experts, dtype=np.int64)
        for rank, experts in enumerate(self.slots):
            for slot, expert in enumerate(experts):
                ranks[expert, seen[expert]], slots[expert, seen[expert]] = rank, slot
                seen[expert] += 1
        return ranks, slots

    def choose(self, chosen: NDArray[np.int64], rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rank and slot of each expert [T, k] that rows of `rank` take; both [T, k]."""
        ranks, slots = self._places
        turn = (np.arange(chosen.shape[0])[:, None] + rank) % self.copies[chosen]
        return ranks[chosen, turn], slots[chosen, turn]


def starting_placement(num_experts: int, layout: ParallelLayout) -> ExpertPlacement:
    """Before any load is known: neighbours together, and copies of the first ones in the slots that are left."""
    num_slots = num_experts // layout.ep_size + layout.num_redundant_experts
    if not layout.num_redundant_experts:
        return ExpertPlacement.even(num_experts, layout.ep_size)
    return find_placement([1.0] * num_experts, layout.ep_size, num_slots)


def part_of(num_rows: int, size: int, rank: int) -> slice:
    """Rank `rank`'s part of rows that all ranks have; parts are neighbours and differ by one row at most."""
    return slice(num_rows * rank // size, num_rows * (rank + 1) // size)


def dispatch_experts(
    rows: Tensor, chosen: Tensor, gates: Tensor, placement: ExpertPlacement, group: Collectives, run: LocalExperts
) -> Tensor:
    """y[t] = sum over t's experts of gate * expert(rows[t]), wherever the experts are. Every rank of `group` calls it, also without rows.

    rows: [T, hidden] of this rank alone, in the runtime's dtype; chosen: [T, k] int64 expert numbers; gates: [T, k] fp32; run: the
    experts of this rank. Returns [T, hidden] fp32, new. Three exchanges: of counts, of rows, of sums.
    Rounds: the sum of each rank to the rows' dtype, as it travels.
    """
    ranks, slots = placement.choose(chosen.numpy(), group.rank)
    sent = [np.flatnonzero((ranks == rank).any(axis=1)) for rank in range(group.size)]
    sent_counts = [len(each) for each in sent]
    received_counts = group.all_to_all(torch.tensor(sent_counts)[:, None]).flatten().tolist()
    order = torch.from_numpy(np.concatenate(sent))
    parcels = _pack(rows, gates, slots, ranks, sent)
    arrived = _Parcels.unpack(group.all_to_all_rows(parcels, sent_counts, received_counts), rows, chosen.shape[1])
    sums = run(arrived.rows, arrived.slots, arrived.gates).to(rows.dtype)
    returned = group.all_to_all_rows(sums.contiguous(), received_counts, sent_counts)
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for part, places in zip(returned.split(sent_counts), order.split(sent_counts), strict=True):
        total.index_add_(0, places, part.float())  # a row is in a part once: ranks add in ascending order
    return total


def _pack(rows: Tensor, gates: Tensor, slots: NDArray[np.int64], ranks: NDArray[np.int64], sent: Sequence[NDArray[np.int64]]) -> Tensor:
    """[parcels, bytes]: for each rank in order, its rows with their slots there (others ABSENT) and gates."""
    order = torch.from_numpy(np.concatenate(sent))
    targets = np.repeat(np.arange(len(sent)), [len(each) for each in sent])
    here = np.where(ranks[order.numpy()] == targets[:, None], slots[order.numpy()], ABSENT).astype(np.int32)
    parts = (rows.index_select(0, order), torch.from_numpy(here), gates.index_select(0, order))
    return torch.cat([_flat(part) for part in parts], dim=1)


@dataclass(frozen=True, slots=True)
class _Parcels:
    """What arrived. rows: [N, hidden]; slots: [N, k] int64; gates: [N, k] fp32."""

    rows: Tensor
    slots: Tensor
    gates: Tensor

    @classmethod
    def unpack(cls, parcels: Tensor, like: Tensor, num_chosen: int) -> "_Parcels":
        """parcels: as `_pack` made them on ranks whose rows are `like` this rank's."""
        widths = [like.shape[1] * like.element_size(), 4 * num_chosen, 4 * num_chosen]
        rows, slots, gates = parcels.split(widths, dim=1)
        return cls(_typed(rows, like.dtype), _typed(slots, torch.int32).long(), _typed(gates, torch.float32))


def _flat(part: Tensor) -> Tensor:
    """[N, W] as bytes. torch does not reinterpret a tensor without rows."""
    if not part.shape[0]:
        return torch.empty(0, part.shape[1] * part.element_size(), dtype=torch.uint8)
    return part.contiguous().view(torch.uint8)


def _typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `_flat`."""
    if not part.shape[0]:
        return torch.empty(0, part.shape[1] // dtype.itemsize, dtype=dtype)
    return part.contiguous().view(dtype)


def find_placement(load: Sequence[float], num_ranks: int, num_slots: int) -> ExpertPlacement:
    """Spread experts by their load: the heaviest are copied into the slots beyond one each, then ranks are filled evenly.

    load: of each expert, any unit. num_slots: of each rank. Greedy twice: the next copy goes to the expert with the most load a copy,
    at most one a rank; then copies, heaviest first, go to the rank with the least load that has room and not that expert yet.
    Raises ValueError when there are fewer slots than experts.
    """
    num_experts = len(load)
    if num_ranks * num_slots < num_experts:
        raise ValueError(f"{num_experts} experts do not fit into {num_ranks} x {num_slots} slots")
    if num_slots > num_experts:
        raise ValueError(f"a rank has {num_slots} slots for {num_experts} experts, and each at most once")
    copies = [1] * num_experts
    for _ in range(num_ranks * num_slots - num_experts):
        heaviest = max((e for e in range(num_experts) if copies[e] < num_ranks), key=lambda e: (load[e] / copies[e], -e))
        copies[heaviest] += 1
    # The most copied first: only they can run out of ranks. Among equals the heaviest first.
    order = sorted(
        (e for e in range(num_experts) for _ in range(copies[e])), key=lambda e: (-(copies[e] == num_ranks), -load[e] / copies[e], e)
    )
    packing = _Packing([load[expert] / copies[expert] for expert in range(num_experts)], num_ranks, num_slots)
    for expert in order:
        packing.add(expert)
    return ExpertPlacement(num_experts, tuple(tuple(sorted(each)) for each in packing.slots))


class _Packing:
    """Ranks while they are filled. load: of one copy of each expert."""

    def __init__(self, load: Sequence[float], num_ranks: int, num_slots: int) -> None:
        self.slots: list[list[int]] = [[] for _ in range(num_ranks)]
        self._load = load
        self._num_slots = num_slots

    def add(self, expert: int) -> None:
        """Put a copy on the lightest rank that has room and not the expert yet. If only ranks with it have room, the lightest rank
        without it gives one of its own experts away for it: a full rank has one that a rank with room has not.
        """
        with_room = [own for own in self.slots if len(own) < self._num_slots]
        fitting = [own for own in with_room if expert not in own]
        if fitting:
            min(fitting, key=self._weight).append(expert)
            return
        target = min((own for own in self.slots if expert not in own), key=self._weight)
        receiver = min(with_room, key=self._weight)
        given = min((other for other in target if other not in receiver), key=lambda other: self._load[other])
        target.remove(given)
        target.append(expert)
        receiver.append(given)

    def _weight(self, own: Sequence[int]) -> float:
        return sum(self._load[expert] for expert in own)


def balance(placement: ExpertPlacement, load: Sequence[float]) -> float:
    """Load of the fullest rank over the mean of all; 1 is even."""
    each = [sum(load[expert] / placement.copies[expert] for expert in rank) for rank in placement.slots]
    mean = sum(each) / len(each)
    return max(each) / mean if mean else 1.0
