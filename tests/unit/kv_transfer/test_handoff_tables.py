"""Each life-cycle table: reachable, endable, without unused events, and closed to everything it does not name."""

import itertools
from enum import Enum
from pathlib import Path

import pytest

from kv_transfer.handoff import (
    BLOCK_TRANSITIONS,
    RECORD_SCHEMA,
    SINK_TRANSITIONS,
    SOURCE_TRANSITIONS,
    BlockEvent,
    BlockState,
    IllegalTransition,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
    advance,
    digest_record,
    is_record_usable,
    seal_record,
)
from kv_transfer.messages import FinishReason, HandoffRecord, TokenLogprobs
from kv_transfer.state_diagrams import DIAGRAMS, draw

ROOT = Path(__file__).parents[3]
TABLES = {
    "source": (SOURCE_TRANSITIONS, SourceState, SourceEvent, SourceState.QUEUED, {SourceState.RELEASED}),
    "sink": (SINK_TRANSITIONS, SinkState, SinkEvent, SinkState.OFFERED, {SinkState.CLOSED}),
    "block": (BLOCK_TRANSITIONS, BlockState, BlockEvent, BlockState.FREE, {BlockState.FREE}),
}


def reachable(table: dict[Enum, dict[Enum, Enum]], start: Enum) -> set[Enum]:
    seen, work = {start}, [start]
    while work:
        for after in table[work.pop()].values():
            if after not in seen:
                seen.add(after)
                work.append(after)
    return seen


@pytest.mark.parametrize(("table", "states", "events", "first", "ends"), TABLES.values(), ids=TABLES)
def test_a_table_is_whole(table: dict, states: type[Enum], events: type[Enum], first: Enum, ends: set[Enum]) -> None:  # type: ignore[type-arg]
    assert set(table) == set(states), "every state has a row"
    assert reachable(table, first) == set(states), "every state can be reached"
    for state in states:
        assert reachable(table, state) & ends, f"{state} can end"
    assert {event for row in table.values() for event in row} == set(events), "every event is used"
    for end in ends - {first}:
        assert table[end] == {}, f"{end} is an end"


@pytest.mark.parametrize(("table", "states", "events", "first", "ends"), TABLES.values(), ids=TABLES)
def test_every_pair_that_is_not_named_raises(table: dict, states: type[Enum], events: type[Enum], first: Enum, ends: set[Enum]) -> None:  # type: ignore[type-arg]
    for state, event in itertools.product(states, events):
        if event in table[state]:
            assert advance(table, state, event) is table[state][event]
        else:
            with pytest.raises(IllegalTransition, match=f"is {state.value}: {event.value} is not possible now"):
                advance(table, state, event)


def test_a_block_under_a_read_has_no_way_to_free_but_through_the_end_of_the_read() -> None:
    assert set(BLOCK_TRANSITIONS[BlockState.READING]) == {BlockEvent.READ_DONE, BlockEvent.READ_ENDED}


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.file_name)
def test_the_diagrams_in_the_documentation_are_those_of_the_tables(diagram) -> None:  # type: ignore[no-untyped-def]
    path = ROOT / "docs" / "states" / diagram.file_name
    assert path.read_text(encoding="utf-8") == draw(diagram), "stale: run `python -m kv_transfer.state_diagrams`"


RECORD = HandoffRecord(RECORD_SCHEMA, 3, 42, FinishReason.STOP, 7, 64)


def test_a_records_digest_covers_everything_else() -> None:
    sealed = seal_record(RECORD)
    assert is_record_usable(sealed, 3)
    assert not is_record_usable(RECORD, 3), "no digest"
    assert not is_record_usable(sealed, 4), "another index"
    assert not is_record_usable(seal_record(HandoffRecord(RECORD_SCHEMA - 1, 3, 42, None, 7, 64)), 3), "another schema"
    changed = {"token": 1, "finish": None, "seed": 1, "num_cached_tokens": 1, "hidden_state": b"x", "num_mtp_tokens": 1, "choice": 1}
    changed |= {"logprobs": TokenLogprobs(-0.5, 1), "prompt_logprobs": (TokenLogprobs(-0.5, 1),)}
    digests = {digest_record(HandoffRecord(**{**fields(RECORD), name: value})) for name, value in changed.items()}
    assert len(digests | {digest_record(RECORD)}) == len(changed) + 1


def fields(record: HandoffRecord) -> dict:  # type: ignore[type-arg]
    return {name: getattr(record, name) for name in record.__struct_fields__}
