"""When the workers of a replica step together: waves, as a table and plain functions. Pure.

    asleep --WANT(w)--> gate --GO(w)--> all: steps, each begun by saying who has rows --nobody has--> asleep, the next wave is w + 1

A wave begins when a sleeping worker has something to compute and ends, for all in the same step, when nobody has. Both ends count waves,
so a WANT that crossed the GO of its wave asks for nothing new. Nobody is called two waves ahead: a wave ends only with everybody in it.
Knows: who may say what. Does not know connections (`step_gate.py`) or steps (`loop.py`).
"""

from dataclasses import dataclass, replace
from enum import Enum, unique

from kv_transfer.errors import ProtocolMismatch
from kv_transfer.handoff import advance


@unique
class WaveState(Enum):
    """Of one worker. ASKED: it has a plan and waits to be called. CALLED: it steps, and others have been quicker to want the next wave."""

    ASLEEP = "asleep"
    ASKED = "asked"
    STEPPING = "stepping"
    CALLED = "called"


@unique
class WaveEvent(Enum):
    """HAS_PLAN: and no steps are being made. GO: the gate's word. NOBODY_HAD_ROWS: in the step that has returned."""

    HAS_PLAN = "has_plan"
    GO = "go"
    NOBODY_HAD_ROWS = "nobody_had_rows"


WAVE_TRANSITIONS: dict[WaveState, dict[WaveEvent, WaveState]] = {
    WaveState.ASLEEP: {WaveEvent.HAS_PLAN: WaveState.ASKED, WaveEvent.GO: WaveState.STEPPING},
    WaveState.ASKED: {WaveEvent.GO: WaveState.STEPPING},
    WaveState.STEPPING: {WaveEvent.GO: WaveState.CALLED, WaveEvent.NOBODY_HAD_ROWS: WaveState.ASLEEP},
    WaveState.CALLED: {WaveEvent.NOBODY_HAD_ROWS: WaveState.STEPPING},
}


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. wave: the one it is in; while it makes no steps, the next."""

    state: WaveState = WaveState.ASLEEP
    wave: int = 0

    @property
    def is_stepping(self) -> bool:
        """Whether the others count on this worker in every step."""
        return self.state in (WaveState.STEPPING, WaveState.CALLED)


def ask(member: Member) -> Member:
    """The member has a plan and sleeps: WANT(member.wave) goes to the gate."""
    return replace(member, state=advance(WAVE_TRANSITIONS, member.state, WaveEvent.HAS_PLAN))


def hear_go(member: Member, wave: int) -> Member:
    """The gate calls everybody to `wave`. Raises ProtocolMismatch for one that is not this member's next."""
    expected = member.wave + member.is_stepping
    if wave != expected:
        raise ProtocolMismatch(f"called to wave {wave} of steps; the next one here is {expected}")
    return replace(member, state=advance(WAVE_TRANSITIONS, member.state, WaveEvent.GO))


def end_wave(member: Member) -> Member:
    """Nobody had rows in the step that has returned."""
    return Member(advance(WAVE_TRANSITIONS, member.state, WaveEvent.NOBODY_HAD_ROWS), member.wave + 1)


@dataclass(frozen=True, slots=True)
class Gate:
    """next_wave: the first that nobody has been called to."""

    next_wave: int = 0


def hear_want(gate: Gate, wave: int) -> tuple[Gate, int | None]:
    """A member wants `wave`. Returns the wave to call all members to, or None where they have been called to it already.

    Raises ProtocolMismatch for a wave that nobody can be at.
    """
    if wave > gate.next_wave:
        raise ProtocolMismatch(f"wave {wave} of steps is wanted; the next one is {gate.next_wave}")
    if wave < gate.next_wave:
        return gate, None
    return Gate(wave + 1), wave
