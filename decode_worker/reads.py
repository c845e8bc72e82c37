"""READs in flight: hands them to the transfer thread and measures them. Time is passed in.

Knows: when a READ was posted and how many bytes it moves. Does not know what it is for (`kv_transfer.sink_session`).
"""

from dataclasses import dataclass

from kv_transfer.handoff import PostRead
from kv_transfer.identity import PeerId
from kv_transfer.transfer_thread import TransferThread

SMOOTHING = 0.2
"""Weight of the newest READ in a peer's rate."""


@dataclass(frozen=True, slots=True)
class _Posted:
    peer: PeerId
    num_bytes: int
    posted_s: float


class Reads:
    """Posted READs of one worker, and what they added up to."""

    def __init__(self, transfers: TransferThread, block_bytes: int) -> None:
        self.bytes_read = 0
        self.read_s = 0.0
        self._transfers = transfers
        self._block_bytes = block_bytes
        self._posted: dict[int, _Posted] = {}
        self._bytes_per_s: dict[PeerId, float] = {}

    def post(self, read: PostRead, now_s: float) -> None:
        """Start a READ."""
        self._posted[read.read_id] = _Posted(read.peer, len(read.local_ids) * self._block_bytes, now_s)
        self._transfers.post(read)

    def done(self, read_id: int, now_s: float) -> PeerId | None:
        """Count a READ that is DONE; whom it came from, or None for one that was ended before."""
        posted = self._posted.pop(read_id, None)
        if posted is None:
            return None
        took_s = max(now_s - posted.posted_s, 1e-9)
        self.bytes_read += posted.num_bytes
        self.read_s += took_s
        rate = posted.num_bytes / took_s
        known = self._bytes_per_s.get(posted.peer, rate)
        self._bytes_per_s[posted.peer] = known + SMOOTHING * (rate - known)
        return posted.peer

    def failed(self, read_id: int) -> None:
        """Forget a READ that raised."""
        self._posted.pop(read_id, None)

    def ended(self, peer: PeerId) -> None:
        """Forget the READs of a peer whose agent is destroyed."""
        self._posted = {read_id: posted for read_id, posted in self._posted.items() if posted.peer != peer}

    def forget_peer(self, peer: PeerId) -> None:
        """The peer is gone for good."""
        self._bytes_per_s.pop(peer, None)

    def bytes_per_s(self, peer: PeerId) -> float:
        """Smoothed speed of READs from this peer, the wait on the transfer thread included; 0 before the first."""
        return self._bytes_per_s.get(peer, 0.0)

    @property
    def num_in_flight(self) -> int:
        """READs that have not ended."""
        return len(self._posted)
