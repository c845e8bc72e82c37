"""The gate over real connections: everybody is called, strangers are not heard, and a lost worker is everybody's fault."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from glm_runtime.engine.step_gate import GateHost, GateMember
from glm_runtime.engine.step_plan import StepResult
from glm_runtime.engine.waves import Member, WaveState
from kv_transfer.config import WireConfig
from kv_transfer.errors import AuthenticationFailed, EngineFault, PeerLost, ProtocolMismatch, ServingError
from kv_transfer.identity import new_incarnation
from kv_transfer.link import Party, dial
from kv_transfer.messages import BeginWave, DrainWorker, PartyKind, WantWave

SECRET = b"a cluster's secret"
WIRE = WireConfig(hello_timeout_s=0.5, dial_timeout_s=2.0, ping_interval_s=0.05, silence_timeout_s=1.0)
NAMES = ("decode-0", "decode-1", "decode-2")
ROWS, NO_ROWS = StepResult(step_number=1, samples={}), StepResult(step_number=1, samples={}, is_idle=True)


def party(name: str) -> Party:
    return Party(PartyKind.DECODE, name, new_incarnation())


class Replica:
    """A gate and the members that have joined. faults: by who noticed. calls: of each member."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, ServingError]] = []
        self.calls: dict[str, int] = {}
        self.members: dict[str, GateMember] = {}
        self.host = GateHost(SECRET, party(NAMES[0]), "127.0.0.1", NAMES, WIRE, lambda error: self.faults.append(("host", error)))

    async def start(self) -> None:
        self.port = await self.host.start()

    async def join(self, name: str, secret: bytes = SECRET) -> GateMember:
        def called() -> None:
            self.calls[name] = self.calls.get(name, 0) + 1

        member = GateMember(called, lambda error: self.faults.append((name, error)))
        await member.join(secret, party(name), "127.0.0.1", self.port, WIRE)
        self.members[name] = member
        return member

    async def close(self) -> None:
        for member in self.members.values():
            member.close()
        await self.host.close()


def run(script: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        replica = Replica()
        await replica.start()
        try:
            await script(replica)
        finally:
            await replica.close()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


def test_one_worker_s_plan_calls_all() -> None:
    async def script(replica: Replica) -> None:
        first, second, third = [await replica.join(name) for name in NAMES]
        assert not first.may_step(has_plan=False)
        assert not second.may_step(has_plan=True)
        assert not second.may_step(has_plan=True), "it asks once"
        await until(lambda: len(replica.calls) == 3)
        assert all(member.may_step(has_plan=False) for member in (first, second, third))
        for result in (ROWS, NO_ROWS):
            for member in (first, second, third):
                member.take(result)
        assert {member.member for member in (first, second, third)} == {Member(WaveState.ASLEEP, 1)}
        assert not third.may_step(has_plan=True)
        await until(lambda: replica.calls == dict.fromkeys(NAMES, 2))
        assert not replica.faults

    run(script)


def test_nobody_is_called_before_all_are_here() -> None:
    async def script(replica: Replica) -> None:
        first, second = [await replica.join(name) for name in NAMES[:2]]
        for member in (first, second):
            assert not member.may_step(has_plan=True)
        await asyncio.sleep(0.1)
        assert not replica.calls
        await replica.join(NAMES[2])
        await until(lambda: replica.calls == dict.fromkeys(NAMES, 1))

    run(script)


def test_a_stranger_is_turned_away_and_changes_nothing() -> None:
    async def script(replica: Replica) -> None:
        for name in NAMES[:2]:
            await replica.join(name)
        for name in ("decode-7", NAMES[1]):
            stranger = GateMember(lambda: None, lambda error: replica.faults.append(("stranger", error)))
            await stranger.join(SECRET, party(name), "127.0.0.1", replica.port, WIRE)
            await until(lambda: replica.faults)
            assert [who for who, _ in replica.faults] == ["stranger"]
            replica.faults.clear()
        with pytest.raises((AuthenticationFailed, PeerLost)):
            await replica.join(NAMES[2], b"another secret")
        await replica.join(NAMES[2])
        assert not replica.members[NAMES[2]].may_step(has_plan=True)
        await until(lambda: replica.calls == dict.fromkeys(NAMES, 1))
        assert not replica.faults

    run(script)


def test_a_lost_worker_is_the_gate_s_fault_and_a_lost_gate_everybody_s() -> None:
    async def script(replica: Replica) -> None:
        members = [await replica.join(name) for name in NAMES]
        members[1].close()
        await until(lambda: replica.faults)
        ((who, error),) = replica.faults
        assert who == "host"
        assert isinstance(error, EngineFault)
        assert "decode-1 has left" in str(error)
        await replica.host.close()
        await until(lambda: len(replica.faults) == 3)
        assert {who for who, _ in replica.faults[1:]} == {NAMES[0], NAMES[2]}

    run(script)


@pytest.mark.parametrize("message", [DrainWorker(1.0), WantWave(3), BeginWave(0)])
def test_what_no_member_says_ends_the_replica(message: Any) -> None:
    async def script(replica: Replica) -> None:
        links = [await dial(SECRET, party(name), "127.0.0.1", replica.port, config=WIRE) for name in NAMES]
        links[2].post(message)
        await until(lambda: replica.faults)
        ((who, error),) = replica.faults
        assert who == "host"
        assert isinstance(error, ProtocolMismatch)
        for link in links:
            link.close()

    run(script)
