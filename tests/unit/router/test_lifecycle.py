"""The tables of this package, checked as every table is: reachable, ends, used, and nothing else legal."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.handoff import IllegalTransition, advance
from kv_transfer.messages import WorkerState
from kv_transfer.state_diagrams import Diagram, draw
from router.lifecycle import REQUEST_TRANSITIONS, TERMINAL_STATES, RequestEvent, RequestState
from router.registry import WORKER_TRANSITIONS, WorkerEvent
from router.state_diagrams import DIAGRAMS

STATES = Path(__file__).parent.parent.parent.parent / "docs" / "states"
TABLES: list[Any] = [
    pytest.param(REQUEST_TRANSITIONS, RequestState.NEW, RequestEvent, id="request"),
    pytest.param(WORKER_TRANSITIONS, WorkerState.PENDING, WorkerEvent, id="worker"),
]
Table = Mapping[Enum, Mapping[Enum, Enum]]


def _reachable(table: Table, start: Enum) -> set[Enum]:
    found, edge = {start}, [start]
    while edge:
        for state in table[edge.pop()].values():
            if state not in found:
                found.add(state)
                edge.append(state)
    return found


@pytest.mark.parametrize(("table", "start", "events"), TABLES)
def test_every_state_is_reachable(table: Table, start: Enum, events: type[Enum]) -> None:
    assert _reachable(table, start) == set(type(start)) == set(table)


@pytest.mark.parametrize(("table", "start", "events"), TABLES)
def test_every_state_can_reach_an_end(table: Table, start: Enum, events: type[Enum]) -> None:
    for state in table:
        assert any(not table[reached] for reached in _reachable(table, state))


@pytest.mark.parametrize(("table", "start", "events"), TABLES)
def test_every_event_is_used(table: Table, start: Enum, events: type[Enum]) -> None:
    assert {event for row in table.values() for event in row} == set(events)


@pytest.mark.parametrize(("table", "start", "events"), TABLES)
def test_what_is_absent_is_illegal(table: Table, start: Enum, events: type[Enum]) -> None:
    for state, row in table.items():
        for event in events:
            if event in row:
                assert advance(table, state, event) is row[event]
            else:
                with pytest.raises(IllegalTransition):
                    advance(table, state, event)


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.file_name)
def test_the_drawings_are_not_stale(diagram: Diagram) -> None:
    assert (STATES / diagram.file_name).read_text(encoding="utf-8") == draw(diagram), "stale: run `python -m router.state_diagrams`"


def test_a_request_has_two_ends() -> None:
    assert {RequestState.DONE, RequestState.FAILED} == TERMINAL_STATES
