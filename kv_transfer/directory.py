"""The worker table: one server (in the supervisor) collects rows and pushes the whole table, every other process keeps a copy.

Knows: rows, versions, coalescing. Does not know how workers are placed or chosen. Standard library and msgspec only.
"""

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from kv_transfer.config import WireConfig
from kv_transfer.errors import PeerLost, ProtocolMismatch, ServingError
from kv_transfer.identity import Incarnation, WorkerId
from kv_transfer.kept_link import KeptLink
from kv_transfer.link import Link, Party
from kv_transfer.messages import Message, Report, Subscribe, WorkerEntry, WorkerState, WorkerTable

logger = logging.getLogger(__name__)


class DirectoryServer:
    """Accepts Report and Subscribe from links and pushes WorkerTable, coalesced. Pass `accept` to a LinkServer as on_link.

    on_change: called with each new table, when it is pushed.
    """

    def __init__(self, *, config: WireConfig, on_change: Callable[[WorkerTable], None] | None = None) -> None:
        self._config = config
        self._on_change = on_change
        self._entries: dict[WorkerId, WorkerEntry] = {}
        self._gone: set[tuple[WorkerId, Incarnation]] = set()
        self._version = 0
        self._subscribers: set[Link] = set()
        self._push_timer: asyncio.TimerHandle | None = None
        self._last_push_s = -config.table_interval_s

    def accept(self, link: Link) -> None:
        """Serve one connection."""
        link.on_message = lambda message: self._receive(link, message)
        link.on_closed = lambda _reason: self._subscribers.discard(link)

    @property
    def table(self) -> WorkerTable:
        """The table now, rows in the order of their worker ids."""
        return WorkerTable(self._version, tuple(self._entries[worker_id] for worker_id in sorted(self._entries)))

    def put(self, entry: WorkerEntry) -> None:
        """Set a row, e.g. PENDING before its worker runs. A row of an incarnation that is GONE stays GONE."""
        address = entry.address
        if (address.worker_id, address.incarnation) in self._gone or self._entries.get(address.worker_id) == entry:
            return
        self._entries[address.worker_id] = entry
        self._changed()

    def set_gone(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """The actor died: the row becomes GONE and later reports of that incarnation are ignored."""
        self._gone.add((worker_id, incarnation))
        entry = self._entries.get(worker_id)
        if entry is not None and entry.address.incarnation == incarnation:
            self._entries[worker_id] = msgspec.structs.replace(entry, state=WorkerState.GONE)
            self._changed()

    def remove(self, worker_id: WorkerId) -> None:
        """Delete a row, e.g. of a worker that was scaled away."""
        if self._entries.pop(worker_id, None) is not None:
            self._changed()

    def _receive(self, link: Link, message: Message) -> None:
        if isinstance(message, Subscribe):
            self._subscribers.add(link)
            self._post(link, self.table)
        elif isinstance(message, Report):
            address = message.entry.address
            if (address.worker_id, address.incarnation) != (link.peer.party_id, link.peer.incarnation):
                link.close(ProtocolMismatch(f"{link.peer.peer_id} reported the row of {address.worker_id}@{address.incarnation:x}"))
                return
            self.put(message.entry)

    def _changed(self) -> None:
        self._version += 1
        if self._push_timer is None:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time(), self._last_push_s + self._config.table_interval_s)
            self._push_timer = loop.call_at(due_s, self._push)

    def _push(self) -> None:
        self._push_timer = None
        self._last_push_s = asyncio.get_running_loop().time()
        table = self.table
        for link in list(self._subscribers):
            self._post(link, table)
        if self._on_change is not None:
            self._on_change(table)

    def _post(self, link: Link, table: WorkerTable) -> None:
        try:
            link.post(table)
        except PeerLost as error:
            self._subscribers.discard(link)
            logger.info("table not pushed peer=%s error=%s", link.peer.peer_id, error)


class DirectoryClient:
    """Keeps the last table when the directory is gone, redials, and reports its own row on change and each second."""

    def __init__(
        self,
        secret: bytes,
        me: Party,
        host: str,
        port: int,
        on_table: Callable[[WorkerTable], None],
        *,
        config: WireConfig,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._on_table = on_table
        self._table: WorkerTable | None = None
        self._entry: WorkerEntry | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._kept = KeptLink(secret, me, host, port, on_up=self._up, on_down=self._down, config=config, rng=rng)

    async def start(self) -> None:
        """Begin to dial; returns at once."""
        self._kept.start()

    @property
    def table(self) -> WorkerTable | None:
        """The last table, None before the first."""
        return self._table

    @property
    def is_connected(self) -> bool:
        """Whether the directory can be heard now."""
        return self._kept.link is not None

    def report(self, entry: WorkerEntry) -> None:
        """This is my row: sent now if it changed, and again each second."""
        changed = entry != self._entry
        self._entry = entry
        if changed:
            self._post_entry()

    async def close(self) -> None:
        """Disconnect, once what is queued has been sent."""
        await self._kept.close()

    def _up(self, link: Link) -> None:
        link.on_message = self._receive
        link.post(Subscribe())
        self._repeat()

    def _down(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _repeat(self) -> None:
        self._post_entry()
        self._timer = asyncio.get_running_loop().call_later(self._config.report_interval_s, self._repeat)

    def _post_entry(self) -> None:
        if self._entry is None or self._kept.link is None:
            return
        try:
            self._kept.post(Report(self._entry))
        except ServingError as error:
            logger.info("report not sent error=%s", error)

    def _receive(self, message: Message) -> None:
        if isinstance(message, WorkerTable):
            self._table = message
            self._on_table(message)
