"""A transport within one process, with NIXL's surface, its habits and its faults, in virtual time.

Bytes land in pieces (one per block and component), in any order, and are whatever the source's memory holds at that moment. The
faults are NIXL's (TRANSFER.md): a READ may raise and go on writing, hang for ever, or write on after its agent was destroyed
where destroying is not proven. Every piece knows whose block it was posted into: one that lands in a foreign block is recorded.
"""

import math
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId
from kv_transfer.messages import PeerOffer
from kv_transfer.pool_memory import PoolMemory, probe_pattern
from kv_transfer.transports.base import AgentDescription, ReadOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """How likely each fault is for a READ, and how long a piece travels (uniform between the bounds, virtual seconds)."""

    error_rate: float = 0.0
    hang_rate: float = 0.0
    min_delay_s: float = 0.0
    max_delay_s: float = 0.01
    destroying_proven: bool = True


CALM = FaultPlan()


@dataclass(slots=True)
class Piece:
    """Bytes [start, end) of the pool of `source` on their way to the same number of bytes of the pool of `sink`."""

    source: "LoopbackTransport"
    sink: "LoopbackTransport"
    remote_start: int
    local_start: int
    num_bytes: int
    local_block: BlockId
    owner: Hashable
    due_s: float


@dataclass(slots=True)
class _Read:
    read: PostRead
    pieces: list[Piece]
    raises: bool
    hangs: bool
    outcome: ReadOutcome | None = None


class LoopbackFabric:
    """What lies between the transports of one process: the clock, the pieces in flight and the processes that are dead."""

    def __init__(self, plan: FaultPlan = CALM, seed: int = 0, step_s: float = 0.0) -> None:
        """step_s: virtual time that passes with each poll, for users without a hand on the clock."""
        self.plan = plan
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.step_s = step_s
        self.foreign_bytes: list[str] = []
        self.lock = threading.RLock()
        self._pieces: list[Piece] = []
        self._agents: dict[str, LoopbackTransport] = {}
        self._cut: set[tuple[PeerId, PeerId]] = set()

    def advance(self, seconds: float) -> None:
        """Let time pass: pieces that are due land, in the order of their time."""
        with self.lock:
            self.now_s += seconds
            for piece in sorted((piece for piece in self._pieces if piece.due_s <= self.now_s), key=lambda piece: piece.due_s):
                self.land(piece)

    def pieces(self) -> Sequence[Piece]:
        """Pieces in flight, oldest first: for schedules that decide themselves what lands next."""
        return tuple(self._pieces)

    def land(self, piece: Piece) -> None:
        """One piece arrives now, with the bytes that the source holds now."""
        self._pieces.remove(piece)
        if self.is_cut(piece.sink.me, piece.source.me) or piece.source.is_dead or piece.sink.is_dead:
            return
        if piece.sink.owner_of(piece.local_block) != piece.owner:
            self.foreign_bytes.append(f"{piece.num_bytes} bytes landed in block {piece.local_block}, posted for {piece.owner}")
        arriving = piece.source.memory.buffer[piece.remote_start : piece.remote_start + piece.num_bytes]
        piece.sink.memory.buffer[piece.local_start : piece.local_start + piece.num_bytes] = arriving
        piece.sink.landed(piece)

    def cut(self, reader: PeerId, source: PeerId) -> None:
        """From now on nothing that `reader` READs from `source` arrives; nobody is told."""
        self._cut.add((reader, source))

    def is_cut(self, reader: PeerId, source: PeerId) -> bool:
        """Whether READs in this direction are lost."""
        return (reader, source) in self._cut

    def heal(self) -> None:
        """Undo every cut; what was lost stays lost."""
        self._cut.clear()

    # -- for the transports --------------------------------------------------------------------------------------------

    def register(self, name: str, transport: "LoopbackTransport") -> None:
        assert name not in self._agents, f"an agent name is used once, {name} was used before"
        self._agents[name] = transport

    def find(self, name: str) -> "LoopbackTransport | None":
        """The living process that made this agent."""
        transport = self._agents.get(name)
        return None if transport is None or transport.is_dead else transport

    def launch(self, pieces: list[Piece]) -> None:
        self._pieces += pieces

    def withdraw(self, pieces: list[Piece]) -> None:
        self._pieces = [piece for piece in self._pieces if all(piece is not other for other in pieces)]


@dataclass(slots=True)
class _Agent:
    name: str
    epoch: int
    offer: PeerOffer | None = None
    reads: dict[int, _Read] = field(default_factory=dict)


class LoopbackTransport:
    """One process's end. owner_of: whose a block is now; a piece must find its block as it was when it was posted."""

    def __init__(
        self,
        fabric: LoopbackFabric,
        me: PeerId,
        memory: PoolMemory,
        *,
        num_components: int = 1,
        owner_of: Callable[[BlockId], Hashable] = lambda _block_id: None,
    ) -> None:
        assert memory.block_bytes % num_components == 0, "components of one size divide a block"
        self.me = me
        self.memory = memory
        self.owner_of = owner_of
        self.is_dead = False
        self.destroying_proven = fabric.plan.destroying_proven
        self._fabric = fabric
        self._num_components = num_components
        self._agents: dict[PeerId, _Agent] = {}
        self._epochs: dict[PeerId, int] = {}
        self._early: list[ReadOutcome] = []

    def open_peer(self, peer: PeerId) -> AgentDescription:
        with self._fabric.lock:
            self.destroy_peer(peer)
            epoch = self._epochs[peer] = self._epochs.get(peer, 0) + 1
            agent = _Agent(f"{self.me}>{peer}#{epoch}", epoch)
            self._fabric.register(agent.name, self)
            self._agents[peer] = agent
            return AgentDescription(agent.name, epoch, agent.name.encode())

    def connect_peer(self, peer: PeerId, offer: PeerOffer) -> None:
        with self._fabric.lock:
            if self._fabric.find(offer.agent_name) is None:
                raise PeerLost(f"agent {offer.agent_name} cannot be reached")
            if offer.block_bytes != self.memory.block_bytes:
                raise TransferError(f"blocks of {offer.block_bytes} bytes do not fit blocks of {self.memory.block_bytes}")
            self._agents[peer].offer = offer

    def start_probe(self, peer: PeerId) -> None:
        with self._fabric.lock:
            self._probed(peer)

    def is_probe_back(self, peer: PeerId, incarnation: Incarnation) -> bool:
        with self._fabric.lock:
            source = self._probed(peer)
            if self._fabric.is_cut(self.me, source.me):
                return False
            probe = bytes(source.memory.block(source.memory.probe_block))
            if probe != probe_pattern(incarnation, len(probe)):
                raise PeerLost(f"the probe block of {peer} has not the pattern of its incarnation")
            return True

    def _probed(self, peer: PeerId) -> "LoopbackTransport":
        agent = self._agents.get(peer)
        source = self._fabric.find(agent.offer.agent_name) if agent is not None and agent.offer is not None else None
        if source is None:
            raise PeerLost(f"{peer} cannot be reached")
        return source

    def post_read(self, read: PostRead) -> None:
        with self._fabric.lock:
            agent = self._agents.get(read.peer)
            source = self._fabric.find(agent.offer.agent_name) if agent is not None and agent.offer is not None else None
            if agent is None or source is None:
                self._early.append(ReadOutcome(read.read_id, read.peer, PeerLost(f"{read.peer} is not connected")))
                return
            draw = self._fabric.rng.random()
            plan = self._fabric.plan
            raises = draw < plan.error_rate
            hangs = not raises and draw < plan.error_rate + plan.hang_rate
            posted = _Read(read, self._pieces_of(read, source, hangs), raises, hangs)
            agent.reads[read.read_id] = posted
            self._fabric.launch(posted.pieces)

    def _pieces_of(self, read: PostRead, source: "LoopbackTransport", hangs: bool) -> list[Piece]:
        size = self.memory.block_bytes // self._num_components
        plan = self._fabric.plan
        pieces = []
        for local, remote in zip(read.local_ids, read.remote_ids, strict=True):
            for component in range(self._num_components):
                due_s = math.inf if hangs else self._fabric.now_s + self._fabric.rng.uniform(plan.min_delay_s, plan.max_delay_s)
                remote_start = remote * self.memory.block_bytes + component * size
                local_start = local * self.memory.block_bytes + component * size
                pieces.append(Piece(source, self, remote_start, local_start, size, local, self.owner_of(local), due_s))
        self._fabric.rng.shuffle(pieces)
        return pieces

    def landed(self, piece: Piece) -> None:
        """Called by the fabric: one piece fewer is on its way."""
        for agent in self._agents.values():
            for posted in agent.reads.values():
                posted.pieces = [other for other in posted.pieces if other is not piece]

    def poll(self) -> list[ReadOutcome]:
        with self._fabric.lock:
            if self._fabric.step_s:
                self._fabric.advance(self._fabric.step_s)
            outcomes, self._early = self._early, []
            for agent in self._agents.values():
                for posted in list(agent.reads.values()):
                    outcome = self._outcome(agent, posted)
                    if outcome is not None and posted.outcome is None:
                        posted.outcome = outcome
                        outcomes.append(outcome)
                        if outcome.error is None:
                            del agent.reads[posted.read.read_id]
            return outcomes

    def _outcome(self, agent: _Agent, posted: _Read) -> ReadOutcome | None:
        read = posted.read
        if posted.raises:
            return ReadOutcome(read.read_id, read.peer, PeerLost(f"READ {read.read_id} raised"))
        if agent.offer is not None and self._fabric.find(agent.offer.agent_name) is None:
            return ReadOutcome(read.read_id, read.peer, PeerLost(f"{read.peer} died under READ {read.read_id}"))
        return None if posted.hangs or posted.pieces else ReadOutcome(read.read_id, read.peer, None)

    def num_in_flight(self) -> int:
        with self._fabric.lock:
            return len(self._early) + sum(posted.outcome is None for agent in self._agents.values() for posted in agent.reads.values())

    def destroy_peer(self, peer: PeerId) -> None:
        with self._fabric.lock:
            agent = self._agents.pop(peer, None)
            if agent is not None and self.destroying_proven:
                for posted in agent.reads.values():
                    self._fabric.withdraw(posted.pieces)

    def close(self) -> None:
        for peer in list(self._agents):
            self.destroy_peer(peer)

    def die(self) -> None:
        """The process is killed: its READs stop, and those of others from it fail."""
        with self._fabric.lock:
            self.is_dead = True
