"""Wakes the workers of a replica for steps together: the gate, at the first worker, and each worker's connection to it.

Knows: who belongs to the replica, and what is said on the connections. When and why is `waves.py`'s. Nothing is asked again and again:
between waves a connection carries its pings alone. A worker that is lost ends the replica: nobody can make a step without it.
"""

from collections.abc import Callable, Collection

from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.step_runner import EMPTY_PLAN
from glm_runtime.engine.waves import Gate, Member, WaveState, ask, end_wave, hear_go, hear_want
from kv_transfer.config import WireConfig
from kv_transfer.errors import EngineFault, PeerLost, ProtocolMismatch, ServingError
from kv_transfer.link import Link, LinkServer, Party, dial
from kv_transfer.messages import BeginWave, Message, Ping, WantWave

OnFault = Callable[[ServingError], None]


class GateHost:
    """The gate. Used on one event loop.

    members: worker ids of the replica, the host's own included; who else connects is turned away. Nobody is called before all are here.
    on_fault: called once, when one of them is lost or breaks the protocol.
    """

    def __init__(self, secret: bytes, me: Party, host: str, members: Collection[str], wire: WireConfig, on_fault: OnFault) -> None:
        self._gate = Gate()
        self._members = frozenset(members)
        self._on_fault = on_fault
        self._links: dict[str, Link] = {}
        self._early: list[int] = []
        self._is_over = False
        self._server = LinkServer(secret, me, self._admit, host, config=wire)

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError."""
        await self._server.start()
        return self._server.port

    async def close(self) -> None:
        """Call nobody any more; what ends now is no fault."""
        self._is_over = True
        await self._server.close()

    def _admit(self, link: Link) -> None:
        name = link.peer.party_id
        if name not in self._members or name in self._links:
            link.close(ProtocolMismatch(f"{name} is none of the replica's workers, or is here already"))
            return
        self._links[name] = link
        link.on_message = lambda message: self._receive(link, message)
        link.on_closed = lambda reason: self._end(EngineFault(f"{name} has left those that share its experts: {reason or 'it has ended'}"))
        if len(self._links) == len(self._members):
            early, self._early = self._early, []
            for wave in early:
                self._want(wave)

    def _receive(self, link: Link, message: Message) -> None:
        if isinstance(message, Ping):
            return
        if not isinstance(message, WantWave):
            self._end(ProtocolMismatch(f"{link.peer.party_id} says {type(message).__name__} at the gate of steps"))
        elif len(self._links) < len(self._members):
            self._early.append(message.wave)
        else:
            self._want(message.wave)

    def _want(self, wave: int) -> None:
        try:
            self._gate, called_to = hear_want(self._gate, wave)
            for link in self._links.values() if called_to is not None else ():
                link.post(BeginWave(wave))
        except ServingError as error:
            self._end(error)

    def _end(self, error: ServingError) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_fault(error)


class GateMember:
    """One worker's side: what its `EngineLoop` asks about steps that are not its own. Used on the loop's thread.

    on_call: called when steps begin that this worker may not have asked for. on_fault: called once, when the gate is lost.
    """

    def __init__(self, on_call: Callable[[], None], on_fault: OnFault) -> None:
        self.member = Member()
        self._on_call = on_call
        self._on_fault = on_fault
        self._is_over = False
        self._link: Link | None = None

    async def join(self, secret: bytes, me: Party, host: str, port: int, wire: WireConfig) -> None:
        """Connect to the gate. Raises PeerLost, AuthenticationFailed or ProtocolMismatch."""
        self._link = await dial(secret, me, host, port, config=wire)
        self._link.on_message = self._receive
        self._link.on_closed = lambda reason: self._end(EngineFault(f"the gate of steps is gone: {reason or 'it has ended'}"))

    def close(self) -> None:
        """Leave; what ends now is no fault."""
        self._is_over = True
        if self._link is not None:
            self._link.close()

    @property
    def empty_plan(self) -> StepPlan:
        """What is run where this worker has nothing to compute."""
        return EMPTY_PLAN

    def may_step(self, *, has_plan: bool) -> bool:
        """Whether steps are being made, in all of which this worker must be; asks for them where it has a plan and there are none."""
        if has_plan and self.member.state is WaveState.ASLEEP:
            self.member = ask(self.member)
            self._post(WantWave(self.member.wave))
        return self.member.is_stepping

    def take(self, result: StepResult) -> None:
        """A step has returned."""
        if result.is_idle:
            self.member = end_wave(self.member)

    def _post(self, message: WantWave) -> None:
        assert self._link is not None, "a worker has joined before it decides"
        try:
            self._link.post(message)
        except PeerLost as error:
            self._end(error)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Ping):
            return
        if not isinstance(message, BeginWave):
            self._end(ProtocolMismatch(f"the gate of steps says {type(message).__name__}"))
            return
        try:
            self.member = hear_go(self.member, message.wave)
        except ProtocolMismatch as error:
            self._end(error)
            return
        self._on_call()

    def _end(self, error: ServingError) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_fault(error)
