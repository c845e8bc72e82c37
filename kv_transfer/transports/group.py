"""The transport of a worker of several ranks, on its rank 0: sessions and pairs see one worker, bytes go from rank to rank.

Knows: which rank reads which blocks from which rank of the peer (`geometry.plan_move`), that a READ is DONE when all its parts are, and
what the three sentences of `base.py` mean for several. Each rank of ours has an agent for each rank of the peer that it reads from, so
that both can be told apart; the agent that the offer names serves the peer's ranks, all of them. Does not know how a command gets to
another rank (`ranks.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.errors import EngineFault, PeerLost, TransferError
from kv_transfer.geometry import CacheSharding, MovePart, plan_move, rank_incarnation, rank_pairs, rank_peer
from kv_transfer.handoff import PostRead
from kv_transfer.identity import Incarnation, PeerId
from kv_transfer.messages import PeerOffer, RankOffer
from kv_transfer.pairing import check_ranks, offer_of_rank, sharding_of
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import AgentDescription, ReadOutcome, Transport
from kv_transfer.transports.ranks import (
    AskProbe,
    ConnectPeer,
    DestroyPeer,
    FrameLink,
    LinkedRank,
    LocalRank,
    Opened,
    OpenPeer,
    ProbeState,
    Raised,
    RankAnswer,
    RankCommand,
    RankTransport,
    StartProbe,
    as_error,
)


@dataclass(slots=True)
class _Peer:
    """A peer. num_blocks: of each of its ranks. pairs: (own rank, its rank). probing: pairs whose probe is not back."""

    sharding: CacheSharding
    num_blocks: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    is_connected: bool = False
    probing: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Reading:
    """A READ with parts under way."""

    read: PostRead
    num_left: int
    has_raised: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    reading: _Reading
    part: MovePart


class GroupTransport:
    """`Transport` over the transports of all ranks, rank 0's own first. sharding: how this worker's blocks lie on them.

    bytes_moved: by (own rank, the peer's rank), what has arrived. Raises EngineFault when a rank of this worker is lost or late.
    """

    def __init__(self, ranks: Sequence[RankTransport], sharding: CacheSharding) -> None:
        if len(ranks) != sharding.num_ranks or len({rank.pool.block_bytes for rank in ranks}) != 1:
            sizes = [rank.pool.block_bytes for rank in ranks]
            raise EngineFault(f"ranks with blocks of {sizes} bytes are no worker of {sharding.num_ranks} ranks with blocks of one size")
        self.destroying_proven = all(rank.pool.destroying_proven for rank in ranks)
        self.bytes_moved: dict[tuple[int, int], int] = {}
        self._ranks = tuple(ranks)
        self._sharding = sharding
        self._block_bytes = ranks[0].pool.block_bytes
        self._peers: dict[PeerId, _Peer] = {}
        self._agents: dict[PeerId, set[tuple[int, PeerId]]] = {}
        self._readings: dict[int, _Reading] = {}
        self._parts: dict[int, _Part] = {}
        self._next_part = 1
        self._early: list[ReadOutcome] = []

    @classmethod
    def of_worker(
        cls, own: Transport, memory: PoolMemory, sharding: CacheSharding, links: Sequence[FrameLink], timeout_s: float
    ) -> "GroupTransport":
        """The transport of a worker whose rank 0 has `own` and `memory`, and whose ranks 1, 2 ... serve at the other ends of `links`.

        A worker of one rank has a group, too: its peers may have several. timeout_s: for an answer of a rank; EngineFault when it does not
        come.
        """
        others = [LinkedRank(rank, link, timeout_s) for rank, link in enumerate(links, start=1)]
        return cls((LocalRank(own, memory), *others), sharding)

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def open_peer(self, peer: PeerId) -> AgentDescription:
        """See `Transport`: an agent on every rank."""
        self.destroy_peer(peer)
        agents = [answer for answer in self._open(peer, [(rank, peer) for rank in range(len(self._ranks))]) if isinstance(answer, Opened)]
        others = [
            RankOffer(agent.name, agent.metadata, rank.pool.base_address, rank.pool.num_blocks, rank.pool.device_id)
            for agent, rank in zip(agents[1:], self._ranks[1:], strict=True)
        ]
        return AgentDescription(agents[0].name, agents[0].epoch, agents[0].metadata, tuple(others))

    def connect_peer(self, peer: PeerId, offer: PeerOffer) -> None:
        """See `Transport`: each rank is connected with those of the peer's that it may read from."""
        check_ranks(offer)
        if any(part.reading.read.peer == peer for part in self._parts.values()):
            raise TransferError(f"READs from {peer} are in flight: destroy its agents instead of connecting it again")
        sharding = sharding_of(offer)
        num_blocks = (offer.num_blocks, *(other.num_blocks for other in offer.other_ranks))
        known = self._peers[peer] = _Peer(sharding, num_blocks, tuple(rank_pairs(sharding, self._sharding)))
        self._open(peer, [(own, rank_peer(peer, theirs)) for own, theirs in known.pairs if theirs])
        self._ask([(own, ConnectPeer(rank_peer(peer, theirs), offer_of_rank(offer, theirs))) for own, theirs in known.pairs])
        known.is_connected = True

    def _open(self, peer: PeerId, agents: Sequence[tuple[int, PeerId]]) -> list[RankAnswer]:
        """Make these agents, (own rank, name of the other end), and remember that they must be destroyed with the peer."""
        self._agents.setdefault(peer, set()).update(agents)
        return self._ask([(rank, OpenPeer(name)) for rank, name in agents])

    def start_probe(self, peer: PeerId) -> None:
        """See `Transport`: one probe between each two ranks between which blocks will move; those of one rank after each other."""
        known = self._connected(peer)
        known.probing = list(known.pairs)
        self._start_probes(peer, _first_of_each(known.probing))

    def is_probe_back(self, peer: PeerId, incarnation: Incarnation) -> bool:
        """See `Transport`: whether all of them have come, each with the pattern of the right rank."""
        known = self._peers.get(peer)
        if known is None or not known.probing:
            raise PeerLost(f"no probe of {peer} is under way")
        asked = _first_of_each(known.probing)
        answers = self._ask([(own, AskProbe(rank_peer(peer, theirs), rank_incarnation(incarnation, theirs))) for own, theirs in asked])
        back = [pair for pair, answer in zip(asked, answers, strict=True) if isinstance(answer, ProbeState) and answer.is_back]
        known.probing = [pair for pair in known.probing if pair not in back]
        ranks_back = {own for own, _ in back}
        self._start_probes(peer, [pair for pair in _first_of_each(known.probing) if pair[0] in ranks_back])
        return not known.probing

    def _connected(self, peer: PeerId) -> _Peer:
        known = self._peers.get(peer)
        if known is None or not known.is_connected:
            raise PeerLost(f"{peer} is not connected")
        return known

    def _start_probes(self, peer: PeerId, pairs: Sequence[tuple[int, int]]) -> None:
        self._ask([(own, StartProbe(rank_peer(peer, theirs))) for own, theirs in pairs])

    # -- READs ---------------------------------------------------------------------------------------------------------

    def post_read(self, read: PostRead) -> None:
        """See `Transport`: cut into one part for each two ranks."""
        try:
            parts = self._plan(read)
        except TransferError as error:
            self._early.append(ReadOutcome(read.read_id, read.peer, error))
            return
        reading = self._readings[read.read_id] = _Reading(read, len(parts))
        for part in parts:
            number = self._next_part
            self._next_part += 1
            self._parts[number] = _Part(reading, part)
            peer = rank_peer(read.peer, part.source_rank)
            self._ranks[part.sink_rank].post(PostRead(number, peer, part.sink_ids, part.source_ids))

    def _plan(self, read: PostRead) -> tuple[MovePart, ...]:
        peer = self._connected(read.peer)
        parts = plan_move(peer.sharding, self._sharding, read.first_block, read.local_ids, read.remote_ids, read.serving_ranks)
        for part in parts:
            if not 0 <= min(part.source_ids) <= max(part.source_ids) < peer.num_blocks[part.source_rank]:
                raise TransferError(
                    f"rank {part.source_rank} of {read.peer} has {peer.num_blocks[part.source_rank]} blocks, not all of those"
                )
        return parts

    def poll(self) -> list[ReadOutcome]:
        """See `Transport`: a READ is DONE with its last part, and has raised with the first that has; the others run to their end, or
        until the peer is destroyed.
        """
        told, self._early = self._early, []
        for rank in self._ranks:
            for outcome in rank.poll():
                part = self._parts.pop(outcome.read_id, None)
                if part is not None:
                    told += self._end_part(part, outcome.error)
        return told

    def _end_part(self, ended: _Part, error: TransferError | None) -> list[ReadOutcome]:
        reading, part = ended.reading, ended.part
        read = reading.read
        reading.num_left -= 1
        if error is None:
            ranks = (part.sink_rank, part.source_rank)
            self.bytes_moved[ranks] = self.bytes_moved.get(ranks, 0) + len(part.sink_ids) * self._block_bytes
        if reading.has_raised:
            return []
        if error is not None:
            reading.has_raised = True
            del self._readings[read.read_id]
            what = f"rank {part.sink_rank} from rank {part.source_rank} of {read.peer}: {error.message}"
            return [ReadOutcome(read.read_id, read.peer, as_error(Raised(error.code, what)))]
        if reading.num_left:
            return []
        del self._readings[read.read_id]
        return [ReadOutcome(read.read_id, read.peer, None)]

    def num_in_flight(self) -> int:
        """See `Transport`."""
        return len(self._early) + len(self._readings)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def destroy_peer(self, peer: PeerId) -> None:
        """See `Transport`: when this returns, no rank has an agent for any rank of the peer."""
        self._peers.pop(peer, None)
        self._ask([(rank, DestroyPeer(name)) for rank, name in sorted(self._agents.pop(peer, ()))])
        self._early = [outcome for outcome in self._early if outcome.peer != peer]
        self._readings = {read_id: reading for read_id, reading in self._readings.items() if reading.read.peer != peer}
        self._parts = {number: part for number, part in self._parts.items() if part.reading.read.peer != peer}

    def close(self) -> None:
        """See `Transport`: on every rank."""
        for rank in reversed(self._ranks):
            rank.close()

    def _ask(self, commands: Sequence[tuple[int, RankCommand]]) -> list[RankAnswer]:
        """Ask the ranks, rank 0 last, so that they work at the same time; the answers, in order of `commands`.

        Raises the first TransferError that a rank tells of, after all have answered.
        """
        order = sorted(range(len(commands)), key=lambda index: -commands[index][0])
        for index in order:
            rank, command = commands[index]
            self._ranks[rank].ask(command)
        answered = {index: self._ranks[commands[index][0]].answer() for index in order}
        answers = [answered[index] for index in range(len(commands))]
        for (rank, command), answer in zip(commands, answers, strict=True):
            if isinstance(answer, Raised):
                raise (
                    as_error(answer)
                    if rank == 0
                    else as_error(Raised(answer.code, f"rank {rank}, {type(command).__name__}: {answer.message}"))
                )
        return answers


def _first_of_each(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first pair of each own rank: its probes land in one block, so one is under way at a time."""
    first = {own: (own, theirs) for own, theirs in reversed(pairs)}
    return [first[own] for own in sorted(first)]
