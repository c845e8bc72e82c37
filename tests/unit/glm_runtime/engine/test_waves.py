"""The table of waves, and what members and gate refuse."""

import itertools
from pathlib import Path

import pytest

from glm_runtime.engine.state_diagrams import DIAGRAMS
from glm_runtime.engine.waves import WAVE_TRANSITIONS, Gate, Member, WaveEvent, WaveState, ask, end_wave, hear_go, hear_want
from kv_transfer.errors import ProtocolMismatch
from kv_transfer.handoff import IllegalTransition, advance
from kv_transfer.state_diagrams import draw

STATES = Path(__file__).parents[4] / "docs" / "states"


def reachable(start: WaveState) -> set[WaveState]:
    seen, work = {start}, [start]
    while work:
        for after in WAVE_TRANSITIONS[work.pop()].values():
            if after not in seen:
                seen.add(after)
                work.append(after)
    return seen


def test_every_state_is_reached_from_every_other_and_every_event_is_used() -> None:
    assert set(WAVE_TRANSITIONS) == set(WaveState)
    assert all(reachable(state) == set(WaveState) for state in WaveState)
    assert {event for row in WAVE_TRANSITIONS.values() for event in row} == set(WaveEvent)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WaveState, WaveEvent)))
def test_what_the_table_does_not_name_is_refused(state: WaveState, event: WaveEvent) -> None:
    if event in WAVE_TRANSITIONS[state]:
        assert advance(WAVE_TRANSITIONS, state, event) is WAVE_TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition):
            advance(WAVE_TRANSITIONS, state, event)


def test_the_drawing_is_not_stale() -> None:
    (diagram,) = DIAGRAMS
    assert (STATES / diagram.file_name).read_text(encoding="utf-8") == draw(diagram), f"stale: run `python -m {diagram.module}`"


def test_a_worker_sleeps_asks_steps_and_sleeps() -> None:
    member = ask(Member())
    assert (member.state, member.wave, member.is_stepping) == (WaveState.ASKED, 0, False)
    member = hear_go(member, 0)
    assert member.is_stepping
    assert end_wave(member) == Member(WaveState.ASLEEP, 1)


def test_one_that_is_slow_to_end_a_wave_goes_on_with_the_next() -> None:
    member = hear_go(hear_go(Member(), 0), 1)
    assert member == Member(WaveState.CALLED, 0)
    assert end_wave(member) == Member(WaveState.STEPPING, 1)


@pytest.mark.parametrize(("member", "wave"), [(Member(), 1), (Member(wave=3), 2), (Member(WaveState.STEPPING, 3), 3), (Member(), -1)])
def test_a_call_to_another_wave_is_no_protocol(member: Member, wave: int) -> None:
    with pytest.raises(ProtocolMismatch, match=f"called to wave {wave}"):
        hear_go(member, wave)


def test_the_gate_calls_to_each_wave_once() -> None:
    gate, called_to = hear_want(Gate(), 0)
    assert (gate, called_to) == (Gate(1), 0)
    assert hear_want(gate, 0) == (gate, None)
    assert hear_want(gate, 1) == (Gate(2), 1)
    with pytest.raises(ProtocolMismatch, match="wave 2 of steps is wanted; the next one is 1"):
        hear_want(gate, 2)
