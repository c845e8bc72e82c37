"""What a byte transport must do, and the three sentences its users rely on.

1. DONE means that all bytes of the READ have landed. An exception is not DONE.
2. Only DONE, or destroy_peer, ends a READ. Nothing else does: there is no cancel.
3. After destroy_peer has returned, no byte of that peer's READs lands any more - if `destroying_proven`; else perhaps some do.
"""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.errors import TransferError
from kv_transfer.handoff import PostRead
from kv_transfer.identity import Incarnation, PeerId
from kv_transfer.messages import PeerOffer, RankOffer


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """One pair's own agent, as it goes into a PeerOffer; of a worker of several ranks rank 0's, and the others' with their pools."""

    name: str
    epoch: int
    metadata: bytes
    other_ranks: tuple[RankOffer, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """A READ is DONE (error None) or raised; after an error its bytes may still be moving."""

    read_id: int
    peer: PeerId
    error: TransferError | None


class Transport(Protocol):
    """One agent per peer. All methods block and may be called from one thread at a time (`transfer_thread.py`)."""

    destroying_proven: bool

    def open_peer(self, peer: PeerId) -> AgentDescription:
        """Make this side's agent for `peer` under its next epoch. An agent that serves the peer already is destroyed first."""

    def connect_peer(self, peer: PeerId, offer: PeerOffer) -> None:
        """Load the peer's agent and pool. Raises PeerLost when the peer cannot be reached, TransferError for a bad offer."""

    def start_probe(self, peer: PeerId) -> None:
        """Start to READ the peer's probe block. Never waits: one path that is cut must not hold up the READs of others.

        All probes land in one block, so one may be under way at a time. Raises PeerLost when the READ fails.
        """

    def is_probe_back(self, peer: PeerId, incarnation: Incarnation) -> bool:
        """Whether the probe has landed, with the pattern of `incarnation`; to be asked again until it has.

        Raises PeerLost when the pattern is another process's or the READ fails; after that, and when it takes too long, the peer
        must be destroyed.
        """

    def post_read(self, read: PostRead) -> None:
        """Start a READ; how it ended is told by a later poll, also when posting itself fails."""

    def poll(self) -> list[ReadOutcome]:
        """READs that have ended since the last call. Never waits for one."""

    def num_in_flight(self) -> int:
        """READs that poll has not told about yet."""

    def destroy_peer(self, peer: PeerId) -> None:
        """End every READ from `peer` by destroying its agent; their outcomes are never told. Harmless for an unknown peer."""

    def close(self) -> None:
        """Destroy every agent."""
