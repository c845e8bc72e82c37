"""The workers as this gateway sees them: the directory's table, what rides on PING, our own links and our own bookings.

Knows: which worker may be used and what it has to do. Does not know sockets (`worker_links.py`) or the choice (`policy.py`).
Work is booked when a worker is chosen, not when it reports: a burst would else go to one worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from kv_transfer.identity import WorkerId
from kv_transfer.messages import PairState, Ping, WorkerAddress, WorkerEntry, WorkerLoad, WorkerState
from router.policy import DecodeCandidate, Placement, PrefillCandidate, WorkerRef


@unique
class WorkerEvent(Enum):
    """What can happen to a worker. REJOIN is a new incarnation of a quiet one."""

    LAUNCH = "launch"
    LOADED = "loaded"
    OPENED = "opened"
    DRAIN = "drain"
    EMPTY = "empty"
    REJOIN = "rejoin"
    LOST = "lost"


WORKER_TRANSITIONS: dict[WorkerState, dict[WorkerEvent, WorkerState]] = {
    WorkerState.PENDING: {WorkerEvent.LAUNCH: WorkerState.STARTING, WorkerEvent.LOST: WorkerState.GONE},
    WorkerState.STARTING: {WorkerEvent.LOADED: WorkerState.WARM, WorkerEvent.LOST: WorkerState.GONE},
    WorkerState.WARM: {
        WorkerEvent.OPENED: WorkerState.SERVING,
        WorkerEvent.DRAIN: WorkerState.DRAINING,
        WorkerEvent.LOST: WorkerState.GONE,
    },
    WorkerState.SERVING: {WorkerEvent.DRAIN: WorkerState.DRAINING, WorkerEvent.LOST: WorkerState.GONE},
    WorkerState.DRAINING: {WorkerEvent.EMPTY: WorkerState.QUIET, WorkerEvent.LOST: WorkerState.GONE},
    WorkerState.QUIET: {WorkerEvent.REJOIN: WorkerState.SERVING, WorkerEvent.LOST: WorkerState.GONE},
    WorkerState.GONE: {},
}


def address_ref(address: WorkerAddress) -> WorkerRef:
    """The worker start that an address names."""
    return WorkerRef(address.worker_id, address.incarnation)


def pair_refs(pairs: Sequence[PairState]) -> frozenset[WorkerRef]:
    """The peers whose pair is up."""
    return frozenset(WorkerRef(pair.worker_id, pair.incarnation) for pair in pairs if pair.up)


@dataclass(slots=True)
class WorkerView:
    """One worker start.

    busy_until_s: until then decode wants nothing; 0 when it has not said BUSY since the last time that nobody waited. Above 0 it is
    offered one request at a time: is_probed says that one is on its way. Else each freed slot would be offered to all who wait.
    """

    entry: WorkerEntry
    state: WorkerState
    load: WorkerLoad
    pairs: frozenset[WorkerRef]
    is_linked: bool = False
    booked_prefill_tokens: int = 0
    booked_decode_tokens: int = 0
    booked_requests: int = 0
    busy_until_s: float = 0.0
    is_probed: bool = False

    @property
    def ref(self) -> WorkerRef:
        """Which start of which worker this is."""
        return address_ref(self.entry.address)

    @property
    def is_usable(self) -> bool:
        """Whether it serves and we can talk to it."""
        return self.is_linked and self.state is WorkerState.SERVING

    def is_open(self, now_s: float) -> bool:
        """Whether this is a decode worker that may be offered a request now."""
        return self.entry.role == "decode" and self.is_usable and not self.is_probed and self.busy_until_s <= now_s


@dataclass(slots=True)
class Registry:
    """All worker starts that are not gone, by worker id. Not thread-safe; owned by the gateway's loop."""

    block_size_tokens: int
    _views: dict[WorkerId, WorkerView] = field(default_factory=dict)

    def apply_table(self, entries: Sequence[WorkerEntry]) -> list[WorkerRef]:
        """Take the directory's table. Returns the worker starts that no longer exist."""
        lost = []
        fresh = {entry.address.worker_id: entry for entry in entries if entry.state is not WorkerState.GONE}
        for worker_id, view in list(self._views.items()):
            entry = fresh.get(worker_id)
            if entry is None or entry.address.incarnation != view.ref.incarnation:
                lost.append(view.ref)
                del self._views[worker_id]
        for worker_id, entry in fresh.items():
            known = self._views.get(worker_id)
            if known is None:
                self._views[worker_id] = WorkerView(entry, entry.state, entry.load, pair_refs(entry.pairs))
                continue
            # PING and the directory carry the same worker's words; whichever came last is taken, at most a second of error.
            known.entry = entry
            known.state, known.load, known.pairs = entry.state, entry.load, pair_refs(entry.pairs)
        return lost

    def apply_ping(self, ref: WorkerRef, ping: Ping) -> None:
        """Take what a worker says about itself on its own connection."""
        view = self.find(ref)
        if view is None:
            return
        if ping.load is not None:
            view.load = ping.load
        if ping.state is not None:
            view.state = ping.state
            view.pairs = pair_refs(ping.pairs)

    def set_linked(self, ref: WorkerRef, *, is_linked: bool) -> None:
        """Note that our connection to a worker start is up or down."""
        view = self.find(ref)
        if view is not None:
            view.is_linked = is_linked

    def find(self, ref: WorkerRef) -> WorkerView | None:
        """The view of this very start, or None."""
        view = self._views.get(ref.worker_id)
        return view if view is not None and view.ref == ref else None

    def views(self) -> list[WorkerView]:
        """All views, by worker id."""
        return [self._views[worker_id] for worker_id in sorted(self._views)]

    def address(self, ref: WorkerRef) -> WorkerAddress:
        """Where a known worker start listens. Raises KeyError when it is not known."""
        view = self.find(ref)
        if view is None:
            raise KeyError(ref)
        return view.entry.address

    # -- what the policy sees ------------------------------------------------------------------------------------------

    def prefill_candidates(self, overlap_tokens: Callable[[WorkerRef], int]) -> list[PrefillCandidate]:
        """Usable prefill workers. Another gateway's work shows in the report, our own at once in the booking."""
        return [
            PrefillCandidate(
                ref=view.ref,
                queued_tokens=max(view.booked_prefill_tokens, view.load.queued_prefill_tokens),
                overlap_tokens=overlap_tokens(view.ref),
            )
            for view in self._views.values()
            if view.entry.role == "prefill" and view.is_usable
        ]

    def decode_candidates(self, overlap_tokens: Callable[[WorkerRef], int], now_s: float) -> list[DecodeCandidate]:
        """Usable decode workers, without those that are busy."""
        return [
            DecodeCandidate(
                ref=view.ref,
                held_tokens=max(view.booked_decode_tokens, view.load.blocks_held * self.block_size_tokens),
                num_requests=max(view.booked_requests, view.load.num_running + view.load.num_waiting),
                available_tokens=(view.load.blocks_free + view.load.blocks_cached) * self.block_size_tokens,
                pairs=view.pairs,
                overlap_tokens=overlap_tokens(view.ref),
            )
            for view in self._views.values()
            if view.is_open(now_s)
        ]

    def has_open_decode(self, now_s: float) -> bool:
        """Whether any decode worker may be offered a request now."""
        return any(view.is_open(now_s) for view in self._views.values())

    def has_usable_pair(self) -> bool:
        """Whether any request could be served: a decode worker and a prefill worker that it can pull from."""
        prefills = {view.ref for view in self._views.values() if view.entry.role == "prefill" and view.is_usable}
        return any(view.pairs & prefills for view in self._views.values() if view.entry.role == "decode" and view.is_usable)

    def max_model_len_tokens(self) -> int:
        """The shortest context that a known worker announces; 0 when none does."""
        lengths = [view.entry.max_model_len_tokens for view in self._views.values() if view.entry.max_model_len_tokens > 0]
        return min(lengths, default=0)

    # -- bookings and back-pressure ------------------------------------------------------------------------------------

    def book(self, placement: Placement) -> None:
        """Charge a placement to its workers; called once per attempt. A decode worker that was busy is now being probed."""
        decode = self.find(placement.decode)
        if decode is not None:
            decode.booked_decode_tokens += placement.decode_tokens
            decode.booked_requests += 1
            decode.is_probed = decode.busy_until_s > 0.0
        self._charge_prefill(placement, placement.prefill_tokens)

    def release_prefill(self, placement: Placement) -> None:
        """The first token is there, or the attempt is over: prefill owes this request nothing more."""
        self._charge_prefill(placement, -placement.prefill_tokens)

    def release_decode(self, placement: Placement) -> None:
        """The attempt is over: decode holds nothing more for it, and may have room again."""
        decode = self.find(placement.decode)
        if decode is not None:
            decode.booked_decode_tokens -= placement.decode_tokens
            decode.booked_requests -= 1
            decode.is_probed = False

    def mark_busy(self, ref: WorkerRef, until_s: float) -> None:
        """Decode said BUSY: offer it nothing until then, and then one request first."""
        view = self.find(ref)
        if view is not None:
            view.busy_until_s = until_s
            view.is_probed = False

    def mark_ready(self, ref: WorkerRef) -> None:
        """Decode granted credit: the next one may be offered."""
        view = self.find(ref)
        if view is not None:
            view.is_probed = False

    def forget_busy(self, now_s: float) -> None:
        """Nobody waits any more: whoever was busy and is not now may be offered several requests at once again."""
        for view in self._views.values():
            if view.busy_until_s <= now_s:
                view.busy_until_s = 0.0

    def mark_relieved(self, ref: WorkerRef, now_s: float) -> None:
        """A request has left a decode worker: if it was busy, find out at once."""
        view = self.find(ref)
        if view is not None:
            view.busy_until_s = min(view.busy_until_s, now_s)

    def _charge_prefill(self, placement: Placement, num_tokens: int) -> None:
        if placement.prefill is None:
            return
        prefill = self.find(placement.prefill)
        if prefill is not None:
            prefill.booked_prefill_tokens += num_tokens
