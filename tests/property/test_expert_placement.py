"""Placements of experts: everyone has a place, copies are taken by turns, and load is spread."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.parallel.expert import ABSENT, ExpertPlacement, balance, find_placement


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[float], int, int]:
    num_experts = draw(st.integers(1, 24))
    num_ranks = draw(st.integers(1, 8))
    least = -(-num_experts // num_ranks)
    num_slots = draw(st.integers(least, min(num_experts, least + 3)))
    load = draw(st.lists(st.floats(0, 1000), min_size=num_experts, max_size=num_experts))
    return load, num_ranks, num_slots


@given(loads())
def test_every_expert_has_a_place_and_every_slot_an_expert(case: tuple[list[float], int, int]) -> None:
    load, num_ranks, num_slots = case
    placement = find_placement(load, num_ranks, num_slots)  # its own assertions check the rest
    assert placement.num_ranks == num_ranks
    assert all(len(rank) == num_slots for rank in placement.slots)


@given(loads(), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_a_choice_names_a_copy_of_that_expert(case: tuple[list[float], int, int], rank: int, seed: int) -> None:
    load, num_ranks, num_slots = case
    placement = find_placement(load, num_ranks, num_slots)
    chosen = np.random.default_rng(seed).integers(0, len(load), (5, 3))
    ranks, slots = placement.choose(chosen, rank)
    assert [[placement.slots[r][s] for r, s in zip(*row, strict=True)] for row in zip(ranks, slots, strict=True)] == chosen.tolist()


@given(loads(), st.integers(0, 2**32 - 1))
def test_rows_that_all_ranks_have_take_each_expert_on_one_of_them(case: tuple[list[float], int, int], seed: int) -> None:
    load, num_ranks, num_slots = case
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, len(load), (5, 3)))
    placements = [find_placement(load, num_ranks, num_slots)]
    if len(load) % num_ranks == 0:
        placements.append(ExpertPlacement.even(len(load), num_ranks))
    for placement in placements:
        taken = [
            torch.where(slots < 0, ABSENT, torch.tensor(placement.slots[rank])[slots])
            for rank in range(num_ranks)
            for slots in [placement.here(chosen, rank)]
        ]
        assert ((torch.stack(taken) >= 0).sum(0) == 1).all()
        assert torch.equal(torch.stack(taken).amax(0), chosen)


def test_copies_are_taken_by_turns() -> None:
    placement = ExpertPlacement(2, ((0, 1), (0, 1)))
    ranks, _ = placement.choose(np.array([[0], [0], [0], [1]]), 0)
    assert ranks.ravel().tolist() == [0, 1, 0, 1]
    assert placement.choose(np.array([[0]]), 1)[0].tolist() == [[1]]


def test_skewed_load_is_spread_by_copies() -> None:
    load = [100.0, 100.0, *[10.0] * 14]
    even, found = ExpertPlacement.even(16, 4), find_placement(load, 4, 5)
    assert balance(even, load) > 2.5
    assert balance(found, load) < 1.15


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="5 experts do not fit"):
        find_placement([1.0] * 5, 2, 2)
    with pytest.raises(ValueError, match="each at most once"):
        find_placement([1.0] * 2, 2, 3)
    with pytest.raises(ValueError, match="cannot be spread"):
        ExpertPlacement.even(5, 2)
