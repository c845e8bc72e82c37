"""Experts that move between ranks while these serve: the same weights at other places, and the same answers."""

import pytest
import torch
from torch import Tensor

from glm_runtime.engine.offline import generate
from glm_runtime.moe import MixtureOfExperts
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.expert import ExpertPlacement, find_placement
from glm_runtime.parallel.expert_balance import ExpertBalancer, ExpertShelf, ExpertStacks
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.runtime import GlmRuntime
from kv_transfer.messages import SamplingParameters
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, load_rank, one_rank_answers
from tests.rank_pool import RankPool

NUM_EXPERTS = 8
SKEWED = [40.0, 30.0, 20.0, 1.0, 1.0, 1.0, 1.0, 6.0]
PROMPTS = [make_prompt(length, 40 + length) for length in (5, 90)]
GREEDY = SamplingParameters(max_tokens=24, seed=0, temperature=0.0)
CONFIG = config_of(TINY)


def stack_of(experts: tuple[int, ...]) -> ExpertStacks:
    """Weights that say whose they are."""
    return ExpertStacks(
        gate_up=torch.stack([torch.full((4, 3), float(expert)) for expert in experts]),
        down=torch.stack([torch.full((3, 2), 100.0 + expert, dtype=torch.bfloat16) for expert in experts]),
    )


def moved(context: ParallelContext, placements: list[ExpertPlacement]) -> tuple[Tensor, Tensor]:
    shelf = ExpertShelf(stack_of(placements[0].slots[context.rank]), placements[0])
    for placement in placements[1:]:
        shelf.move(placement, context.world)
    assert isinstance(shelf.stacks.gate_up, Tensor)
    assert isinstance(shelf.stacks.down, Tensor)
    return shelf.stacks.gate_up, shelf.stacks.down


def test_every_slot_gets_the_weights_of_its_expert(rank_pool: RankPool) -> None:
    placements = [
        find_placement([1.0] * NUM_EXPERTS, 4, 3),
        find_placement(SKEWED, 4, 3),
        find_placement(SKEWED[::-1], 4, 3),
        find_placement([1.0] * NUM_EXPERTS, 4, 3),
    ]
    results = rank_pool.run(ParallelLayout(tp_size=4, is_expert_parallel=True), moved, placements)
    for rank, (gate_up, down) in enumerate(results):
        right = stack_of(placements[-1].slots[rank])
        assert torch.equal(gate_up, right.gate_up)  # type: ignore[arg-type]
        assert torch.equal(down, right.down)  # type: ignore[arg-type]


def mixtures(runtime: GlmRuntime) -> list[MixtureOfExperts]:
    assert runtime.mtp is not None
    return [layer.mlp for layer in (*runtime.model.layers, runtime.mtp.layer) if isinstance(layer.mlp, MixtureOfExperts)]


def answers_after_moves(context: ParallelContext) -> tuple[list[list[int]], int]:
    """Answers before which experts have moved, and how often a layer's did."""
    runtime = load_rank(context, CONFIG)
    shelves = [mixture.shelf for mixture in mixtures(runtime) if mixture.shelf is not None]
    balancer = ExpertBalancer(shelves, context.world, 2)
    answers = []
    for first, prompt in enumerate(PROMPTS):
        for shelf in shelves:  # as if some neighbours had been asked for more than all others
            shelf.taken[first : first + shelf.placement.num_experts // 4] += 1000
        for _ in range(2 + len(shelves)):
            balancer.after_step()
        answers += generate(runtime, [prompt], GREEDY)
    return answers, balancer.num_moved


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp_size=2, is_expert_parallel=True), ParallelLayout(pcp_size=2, is_expert_parallel=True)]
)
def test_answers_are_those_of_one_rank_wherever_experts_lie(rank_pool: RankPool, layout: ParallelLayout) -> None:
    answers, num_moved = rank_pool.run(layout, answers_after_moves)[0]
    assert num_moved > 0, "load this uneven moves experts"
    assert_answers(answers, *one_rank_answers(CONFIG, PROMPTS, GREEDY))


def steps_with_unequal_sizes(context: ParallelContext) -> int:
    placement = ExpertPlacement.even(NUM_EXPERTS, 2)
    stacks = stack_of(placement.slots[context.rank])
    if context.rank:
        assert isinstance(stacks.down, Tensor)
        stacks.down = stacks.down.float()
    shelf = ExpertShelf(stacks, placement)
    balancer = ExpertBalancer([shelf], context.world, 2)
    shelf.taken[0] = 1000
    for _ in range(6):
        balancer.after_step()
    return balancer.num_moved


def test_experts_of_unequal_sizes_stay_where_they_are(rank_pool: RankPool) -> None:
    assert rank_pool.run(ParallelLayout(tp_size=2, is_expert_parallel=True), steps_with_unequal_sizes) == [0, 0]
