"""Chunk plans hold their promises for demands nobody thought of."""

from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.engine.chunk_plan import Chunk, PrefillDemand, plan_chunks
from kv_transfer.identity import SequenceId

BLOCK = 8


@st.composite
def demand_lists(draw: st.DrawFn) -> list[PrefillDemand]:
    demands = []
    for index in range(draw(st.integers(0, 6))):
        num_tokens = draw(st.integers(1, 100))
        demands.append(
            PrefillDemand(
                sequence_id=SequenceId(f"s{index}"), num_computed_tokens=draw(st.integers(0, num_tokens - 1)), num_tokens=num_tokens
            )
        )
    return demands


def plan(demands: list[PrefillDemand], budget_tokens: int) -> tuple[Chunk, ...]:
    return plan_chunks(demands, budget_tokens=budget_tokens, block_size_tokens=BLOCK)


@given(demand_lists(), st.integers(0, 200))
def test_never_over_budget_and_one_chunk_each_in_order(demands: list[PrefillDemand], budget_tokens: int) -> None:
    chunks = plan(demands, budget_tokens)
    assert sum(chunk.num_tokens for chunk in chunks) <= budget_tokens
    ids = [chunk.sequence_id for chunk in chunks]
    assert ids == [demand.sequence_id for demand in demands if demand.sequence_id in set(ids)]


@given(demand_lists(), st.integers(0, 200))
def test_chunks_end_at_a_block_edge_or_where_the_prompt_ends(demands: list[PrefillDemand], budget_tokens: int) -> None:
    by_id = {demand.sequence_id: demand for demand in demands}
    for chunk in plan(demands, budget_tokens):
        demand = by_id[chunk.sequence_id]
        assert chunk.start == demand.num_computed_tokens < chunk.end <= demand.num_tokens
        assert chunk.is_last == (chunk.end == demand.num_tokens)
        assert chunk.is_last or chunk.end % BLOCK == 0


@given(demand_lists(), st.integers(0, 200))
def test_budget_is_used_up_to_less_than_a_block_or_every_demand_is_met(demands: list[PrefillDemand], budget_tokens: int) -> None:
    chunks = plan(demands, budget_tokens)
    left_tokens = budget_tokens - sum(chunk.num_tokens for chunk in chunks)
    assert left_tokens < BLOCK or sum(chunk.is_last for chunk in chunks) == len(demands)


@given(demand_lists(), st.integers(BLOCK, 200))
def test_the_first_demand_gets_half_of_what_it_asks_for_or_of_the_budget(demands: list[PrefillDemand], budget_tokens: int) -> None:
    if not demands:
        return
    first = plan(demands, budget_tokens)[0]
    wanted = demands[0].num_tokens - demands[0].num_computed_tokens
    assert first.sequence_id == demands[0].sequence_id
    assert first.num_tokens >= min(wanted, max(1, budget_tokens // 2 - BLOCK + 1))


@given(demand_lists(), st.integers(BLOCK, 64))
def test_every_prompt_ends_within_the_number_of_blocks_asked_for(demands: list[PrefillDemand], budget_tokens: int) -> None:
    computed = {demand.sequence_id: demand.num_computed_tokens for demand in demands}
    bound = sum(-(-(demand.num_tokens - demand.num_computed_tokens) // BLOCK) + 1 for demand in demands)
    for _ in range(bound):
        left = [
            PrefillDemand(sequence_id=d.sequence_id, num_computed_tokens=computed[d.sequence_id], num_tokens=d.num_tokens)
            for d in demands
            if computed[d.sequence_id] < d.num_tokens
        ]
        for chunk in plan(left, budget_tokens):
            computed[chunk.sequence_id] = chunk.end
    assert all(computed[demand.sequence_id] == demand.num_tokens for demand in demands)


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    long = PrefillDemand(sequence_id=SequenceId("long"), num_computed_tokens=0, num_tokens=10_000)
    short = PrefillDemand(sequence_id=SequenceId("short"), num_computed_tokens=0, num_tokens=30)
    chunks = {chunk.sequence_id: chunk for chunk in plan([long, short], 64)}
    assert chunks[short.sequence_id].is_last
    assert chunks[long.sequence_id].end == 32
