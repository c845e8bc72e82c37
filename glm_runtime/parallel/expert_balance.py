"""Expert load balancing: counts what experts are asked for, and moves them between steps so that ranks have equally much to do.

One look at the counts every so many steps, then one layer a step until all that pay are moved: no step waits for more than one layer's
weights. All ranks count steps alike and decide alike from the same sums, so nobody has to be told. An answer's last bits may change
when experts move, because a row's sum is put together by ranks; hence not in deterministic mode.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from glm_runtime.packed_matrix import Operand
from glm_runtime.parallel.collectives import Collectives, as_bytes
from glm_runtime.parallel.expert import ExpertPlacement, balance, find_placement

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.1
"""Of the fullest rank's load over the mean; moving weights costs a step's time or more."""


@dataclass(slots=True)
class ExpertStacks:
    """gate_up [slots, 2 I, hidden] and down [slots, hidden, I] of the experts that are here; replaced when experts move."""

    gate_up: Operand
    down: Operand


@dataclass(slots=True)
class ExpertShelf:
    """One layer's experts on this rank. placement: of all ranks. taken: [experts] int64, how often rows here asked for each."""

    stacks: ExpertStacks
    placement: ExpertPlacement
    taken: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.taken = torch.zeros(self.placement.num_experts, dtype=torch.int64)

    def count(self, chosen: Tensor) -> None:
        """chosen: [T, k] int64 experts of this rank's rows."""
        self.taken += torch.bincount(chosen.flatten(), minlength=self.placement.num_experts)

    def move(self, placement: ExpertPlacement, group: Collectives) -> None:
        """Get what this rank has by `placement`, every rank of `group` at the same time. What has gone is freed."""
        moves = find_moves(self.placement, placement, group.rank)
        self.stacks.gate_up = _moved(self.stacks.gate_up, moves, group)
        self.stacks.down = _moved(self.stacks.down, moves, group)
        self.placement = placement


class Moves(NamedTuple):
    """kept: (old slot, new slot) of experts that stay on this rank. sent: for each rank, old slots in the order in which that rank wants
    them. received: for each rank, the new slots that it fills."""

    kept: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]


def find_moves(old: ExpertPlacement, new: ExpertPlacement, rank: int) -> Moves:
    """What a rank does to get from one placement to another. An expert comes from one of its old places, by turns of who wants it."""
    sent: list[list[int]] = [[] for _ in range(old.num_ranks)]
    received: list[list[int]] = [[] for _ in range(old.num_ranks)]
    kept = []
    for target, experts in enumerate(new.slots):
        for slot, expert in enumerate(experts):
            if expert in old.slots[target]:
                if target == rank:
                    kept.append((old.slots[target].index(expert), slot))
                continue
            holders = [holder for holder, own in enumerate(old.slots) if expert in own]
            source = holders[target % len(holders)]
            if source == rank:
                sent[target].append(old.slots[source].index(expert))
            if target == rank:
                received[source].append(slot)
    return Moves(tuple(kept), tuple(map(tuple, sent)), tuple(map(tuple, received)))


def _moved(operand: Operand, moves: Moves, group: Collectives) -> Operand:
    """A new stack with this rank's new experts, by slot."""
    stack = operand if isinstance(operand, Tensor) else operand.panels
    order = torch.tensor([slot for slots in moves.sent for slot in slots], dtype=torch.int64)
    rows = as_bytes(stack.index_select(0, order).contiguous()).view(len(order), -1) if len(order) else _no_rows(stack)
    arrived = group.all_to_all_rows(rows, [len(slots) for slots in moves.sent], [len(slots) for slots in moves.received])
    moved = torch.empty_like(stack)
    for old_slot, new_slot in moves.kept:
        moved[new_slot] = stack[old_slot]
    for row, new_slot in zip(arrived, (slot for slots in moves.received for slot in slots), strict=True):
        moved[new_slot] = row.view(stack.dtype).view(stack.shape[1:])
    return moved if isinstance(operand, Tensor) else replace(operand, panels=moved)


def _no_rows(stack: Tensor) -> Tensor:
    return torch.empty(0, stack[0].nbytes, dtype=torch.uint8)


def _movable(shelves: Sequence[ExpertShelf], group: Collectives) -> tuple[ExpertShelf, ...]:
    """Those whose experts take equally many bytes on all ranks: packing keeps bf16 where that is exact, else fp32, rank by rank."""
    sizes = torch.tensor([[_item_bytes(shelf.stacks.gate_up), _item_bytes(shelf.stacks.down)] for shelf in shelves])
    is_same = (group.all_gather(sizes) == sizes).all(dim=0).all(dim=1).tolist()
    return tuple(shelf for shelf, is_movable in zip(shelves, is_same, strict=True) if is_movable)


def _item_bytes(operand: Operand) -> int:
    stack = operand if isinstance(operand, Tensor) else operand.panels
    return stack[0].nbytes


class ExpertBalancer:
    """The shelves of all layers on this rank. every_steps: between two looks. group: all ranks that have experts."""

    def __init__(self, shelves: Sequence[ExpertShelf], group: Collectives, every_steps: int) -> None:
        self.num_moved = 0
        self._shelves = _movable(shelves, group)
        if len(self._shelves) < len(shelves) and group.rank == 0:
            logger.warning(
                "experts of some layers stay: their sizes differ from rank to rank movable=%d of=%d", len(self._shelves), len(shelves)
            )
        self._group = group
        self._every_steps = every_steps
        self._num_steps = 0
        self._to_move: deque[tuple[ExpertShelf, ExpertPlacement]] = deque()

    def after_step(self) -> None:
        """Called by every rank after each of its steps, with no exchange of a step under way."""
        self._num_steps += 1
        if self._to_move:
            shelf, placement = self._to_move.popleft()
            shelf.move(placement, self._group)
            self.num_moved += 1
        elif self._num_steps % self._every_steps == 0:
            self._look()

    def _look(self) -> None:
        if not self._shelves:
            return
        counts = torch.stack([shelf.taken for shelf in self._shelves]).float()
        loads = self._group.all_reduce(counts).tolist()
        for shelf, load in zip(self._shelves, loads, strict=True):
            old = shelf.placement
            new = find_placement(load, old.num_ranks, len(old.slots[0]))
            if balance(old, load) - balance(new, load) >= LEAST_GAIN:
                self._to_move.append((shelf, new))
            shelf.taken.zero_()
        if self._to_move and self._group.rank == 0:
            logger.info("experts will move layers=%d of=%d", len(self._to_move), len(self._shelves))
