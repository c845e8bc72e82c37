"""One rank's transport as its worker drives it: in this process (`LocalRank`), or over a connection to the rank's own (`LinkedRank`).

Knows: the few commands that a transport understands, as values and as bytes, and the loop of the far end (`serve_rank`). Does not know
which rank moves what (`group.py`), nor how a connection is opened and proven. A rank of one's own worker that is lost or late ends the
worker: EngineFault, which nobody takes for the trouble of a single pair.
"""

import select
from collections import deque
from typing import Protocol

import msgspec

from kv_transfer.errors import EngineFault, PeerLost, ProtocolMismatch, TransferError, TransferTimeout
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId
from kv_transfer.messages import PeerOffer
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import ReadOutcome, Transport


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what travels between the ranks of one worker; they run the same release, so it has no versions."""


# -- from rank 0; all but PostPart are answered, in order -----------------------------------------------------------------


class OpenPeer(_Frame, frozen=True):
    """`Transport.open_peer`, answered Opened."""

    peer: PeerId


class ConnectPeer(_Frame, frozen=True):
    """`Transport.connect_peer`; of the peer's ranks the offer describes one."""

    peer: PeerId
    offer: PeerOffer


class StartProbe(_Frame, frozen=True):
    """`Transport.start_probe`."""

    peer: PeerId


class AskProbe(_Frame, frozen=True):
    """`Transport.is_probe_back`, answered ProbeState."""

    peer: PeerId
    incarnation: Incarnation


class DestroyPeer(_Frame, frozen=True):
    """`Transport.destroy_peer`: once it is answered, no byte of that peer's READs lands on the rank."""

    peer: PeerId


class CloseRank(_Frame, frozen=True):
    """`Transport.close`; the rank serves no more."""


class PostPart(_Frame, frozen=True):
    """`Transport.post_read`; PartsEnded tells how it ended. Ids are the rank's own."""

    read_id: int
    peer: PeerId
    local_ids: tuple[BlockId, ...]
    remote_ids: tuple[BlockId, ...]


RankCommand = OpenPeer | ConnectPeer | StartProbe | AskProbe | DestroyPeer | CloseRank


# -- from the rank -------------------------------------------------------------------------------------------------------


class RankPool(_Frame, frozen=True):
    """First of all: where the rank's pool lies, and whether destroying an agent is proven to stop its bytes there."""

    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int = 0
    destroying_proven: bool = True

    @classmethod
    def of_memory(cls, memory: PoolMemory, transport: Transport) -> "RankPool":
        """The pool that `transport` reads into."""
        return cls(memory.base_address, memory.block_bytes, memory.num_blocks, destroying_proven=transport.destroying_proven)


class Opened(_Frame, frozen=True):
    """The agent that was made."""

    name: str
    epoch: int
    metadata: bytes


class Done(_Frame, frozen=True):
    """The command is carried out."""


class ProbeState(_Frame, frozen=True):
    """Whether the probe is back."""

    is_back: bool


class Raised(_Frame, frozen=True):
    """The command has failed with a TransferError of this code."""

    code: str
    message: str


class PartsEnded(_Frame, frozen=True):
    """Unasked: parts that are DONE or have raised, each (id, peer, how it raised)."""

    outcomes: tuple[tuple[int, PeerId, Raised | None], ...]


RankAnswer = Opened | Done | ProbeState | Raised

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[RankCommand | PostPart] = msgspec.msgpack.Decoder(RankCommand | PostPart)
_ANSWERS: msgspec.msgpack.Decoder[RankAnswer | PartsEnded | RankPool] = msgspec.msgpack.Decoder(RankAnswer | PartsEnded | RankPool)


def as_error(raised: Raised) -> TransferError:
    """The error that a rank has told of."""
    return (PeerLost if raised.code == PeerLost.code else TransferError)(raised.message)


def carry_out(transport: Transport, command: RankCommand) -> RankAnswer:
    """Do what rank 0 asks."""
    try:
        match command:
            case OpenPeer(peer):
                agent = transport.open_peer(peer)
                return Opened(agent.name, agent.epoch, agent.metadata)
            case ConnectPeer(peer, offer):
                transport.connect_peer(peer, offer)
            case StartProbe(peer):
                transport.start_probe(peer)
            case AskProbe(peer, incarnation):
                return ProbeState(transport.is_probe_back(peer, incarnation))
            case DestroyPeer(peer):
                transport.destroy_peer(peer)
            case CloseRank():
                transport.close()
    except TransferError as error:
        return Raised(error.code, error.message)
    return Done()


class RankTransport(Protocol):
    """One rank's transport. Called on one thread: every `ask` is followed by one `answer`, so that ranks work at the same time."""

    pool: RankPool

    def ask(self, command: RankCommand) -> None:
        """Begin a command. Raises EngineFault when the rank is gone."""

    def answer(self) -> RankAnswer:
        """The answer to the oldest command that has none yet; waits for it. Raises EngineFault when the rank is gone or late."""

    def post(self, part: PostRead) -> None:
        """Start a READ of the rank's own blocks; how it ended is told by a later poll. Raises EngineFault when the rank is gone."""

    def poll(self) -> list[ReadOutcome]:
        """READs that have ended since the last call. Never waits for one. Raises EngineFault when the rank is gone."""

    def close(self) -> None:
        """Destroy the rank's agents and leave it; one that is gone needs no goodbye."""


class LocalRank:
    """A rank of this process."""

    def __init__(self, transport: Transport, memory: PoolMemory) -> None:
        self.pool = RankPool.of_memory(memory, transport)
        self._transport = transport
        self._answers: deque[RankAnswer] = deque()

    def ask(self, command: RankCommand) -> None:
        """See `RankTransport`; it is carried out at once."""
        self._answers.append(carry_out(self._transport, command))

    def answer(self) -> RankAnswer:
        """See `RankTransport`."""
        return self._answers.popleft()

    def post(self, part: PostRead) -> None:
        """See `RankTransport`."""
        self._transport.post_read(part)

    def poll(self) -> list[ReadOutcome]:
        """See `RankTransport`."""
        return self._transport.poll()

    def close(self) -> None:
        """See `RankTransport`."""
        self._transport.close()


class FrameLink(Protocol):
    """A connection between two ranks of a worker on which each end has proven who it is."""

    def fileno(self) -> int:
        """The descriptor: readable when a frame has begun to come, or the end."""

    def send(self, frame: bytes) -> None:
        """Send one frame. Raises PeerLost."""

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next frame. Raises PeerLost when the connection has ended, TransferTimeout when no frame begins within `timeout_s`."""

    def close(self) -> None:
        """End the connection."""


class LinkedRank:
    """Another rank, whose process runs `serve_rank` at the other end of `link`. timeout_s: for an answer."""

    def __init__(self, rank: int, link: FrameLink, timeout_s: float) -> None:
        """Waits for the rank's RankPool. Raises EngineFault when it does not come."""
        self._rank = rank
        self._link = link
        self._timeout_s = timeout_s
        self._ended: list[ReadOutcome] = []
        self._readable = select.poll()
        self._readable.register(link.fileno(), select.POLLIN)
        pool = self._receive()
        if not isinstance(pool, RankPool):
            raise self._fault(f"says {type(pool).__name__} before it has described its pool")
        self.pool = pool

    def ask(self, command: RankCommand) -> None:
        """See `RankTransport`."""
        self._send(command)

    def answer(self) -> RankAnswer:
        """See `RankTransport`."""
        while isinstance(frame := self._receive(), PartsEnded):
            self._take(frame)
        if isinstance(frame, RankPool):
            raise self._fault("describes its pool a second time")
        return frame

    def post(self, part: PostRead) -> None:
        """See `RankTransport`."""
        self._send(PostPart(part.read_id, part.peer, part.local_ids, part.remote_ids))

    def poll(self) -> list[ReadOutcome]:
        """See `RankTransport`."""
        while self._readable.poll(0):
            frame = self._receive()
            if not isinstance(frame, PartsEnded):
                raise self._fault(f"says {type(frame).__name__} unasked")
            self._take(frame)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See `RankTransport`."""
        try:
            self.ask(CloseRank())
            self.answer()
        except EngineFault:
            pass  # it is gone already, and its agents with it
        finally:
            self._link.close()

    def _take(self, frame: PartsEnded) -> None:
        for read_id, peer, raised in frame.outcomes:
            self._ended.append(ReadOutcome(read_id, peer, as_error(raised) if raised is not None else None))

    def _send(self, frame: RankCommand | PostPart) -> None:
        try:
            self._link.send(_ENCODER.encode(frame))
        except PeerLost as error:
            raise self._fault(f"is gone: {error}") from error

    def _receive(self) -> RankAnswer | PartsEnded | RankPool:
        try:
            return _ANSWERS.decode(self._link.receive(self._timeout_s))
        except TransferTimeout as error:
            raise self._fault(f"has not answered for {self._timeout_s:g} s") from error
        except (PeerLost, ProtocolMismatch) as error:
            raise self._fault(f"is gone: {error}") from error
        except msgspec.MsgspecError as error:
            raise self._fault(f"sends what is no answer: {error}") from error

    def _fault(self, what: str) -> EngineFault:
        return EngineFault(f"the transfers of rank {self._rank} of this worker have ended: it {what}", rank=self._rank)


def serve_rank(transport: Transport, memory: PoolMemory, link: FrameLink, poll_interval_s: float) -> None:
    """Carry out what rank 0 asks of this rank's transport, until it says CloseRank. Blocks; the thread's only work.

    poll_interval_s: pause between two looks at READs in flight. Raises PeerLost when rank 0 is gone: then this rank ends, too. In any
    case the transport is closed.
    """
    try:
        link.send(_ENCODER.encode(RankPool.of_memory(memory, transport)))
        while _serve_one(transport, link, poll_interval_s if transport.num_in_flight() else None):
            outcomes = transport.poll()
            if outcomes:
                ended = [(outcome.read_id, outcome.peer, _as_raised(outcome.error)) for outcome in outcomes]
                link.send(_ENCODER.encode(PartsEnded(tuple(ended))))
    finally:
        transport.close()


def _serve_one(transport: Transport, link: FrameLink, timeout_s: float | None) -> bool:
    """Wait for one command and carry it out; False after the last."""
    try:
        frame = link.receive(timeout_s)
    except TransferTimeout:
        return True
    try:
        command = _COMMANDS.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(f"a frame of {len(frame)} bytes is no command for a rank's transport: {error}") from error
    if isinstance(command, PostPart):
        transport.post_read(PostRead(command.read_id, command.peer, command.local_ids, command.remote_ids))
        return True
    link.send(_ENCODER.encode(carry_out(transport, command)))
    return not isinstance(command, CloseRank)


def _as_raised(error: TransferError | None) -> Raised | None:
    return None if error is None else Raised(error.code, error.message)
