"""The worker table: one server (in the supervisor) collects rows and pushes the whole table, every other process keeps a copy.

Knows: rows, versions, coalescing. Does not know how workers are placed or chosen. Standard library and msgspec only.
"""

import random
from collections.abc import Callable

from kv_transfer.config import WireConfig
from kv_transfer.identity import Incarnation, WorkerId
from kv_transfer.link import Link, Party
from kv_transfer.messages import WorkerEntry, WorkerTable


class DirectoryServer:
    """Accepts Report and Subscribe from links and pushes WorkerTable, coalesced. Pass `accept` to a LinkServer as on_link."""

    def __init__(self, *, config: WireConfig, on_change: Callable[[WorkerTable], None] | None = None) -> None:
        raise NotImplementedError

    def accept(self, link: Link) -> None:
        """Serve one connection."""
        raise NotImplementedError

    @property
    def table(self) -> WorkerTable:
        """The table now."""
        raise NotImplementedError

    def put(self, entry: WorkerEntry) -> None:
        """Set a row, e.g. PENDING before its worker runs. A row of an incarnation that is GONE stays GONE."""
        raise NotImplementedError

    def set_gone(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """The actor died: the row becomes GONE and later reports of that incarnation are ignored."""
        raise NotImplementedError

    def remove(self, worker_id: WorkerId) -> None:
        """Delete a row, e.g. of a worker that was scaled away."""
        raise NotImplementedError


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
        raise NotImplementedError

    async def start(self) -> None:
        """Begin to dial; returns at once."""
        raise NotImplementedError

    @property
    def table(self) -> WorkerTable | None:
        """The last table, None before the first."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """Whether the directory can be heard now."""
        raise NotImplementedError

    def report(self, entry: WorkerEntry) -> None:
        """This is my row; sent at once if it changed in more than its load, else with the next second's report."""
        raise NotImplementedError

    async def close(self) -> None:
        """Send the last row and disconnect."""
        raise NotImplementedError
