"""The directory inside the supervisor's process: its server, and when each worker was last heard.

Knows: which rows there are and who reported when. Does not decide anything about workers (`reconcile.py`).
"""

import time
from collections.abc import Callable

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryServer
from kv_transfer.identity import WorkerId, new_incarnation
from kv_transfer.link import Link, LinkServer, Party
from kv_transfer.messages import Message, PartyKind, Report, WorkerEntry, WorkerState

DIRECTORY_ID = "directory"


class DirectoryHost:
    """Serves the worker table and calls `on_report` with each report of a live incarnation."""

    def __init__(self, secret: bytes, host: str, on_report: Callable[[WorkerEntry, float], None], config: WireConfig) -> None:
        me = Party(PartyKind.SUPERVISOR, DIRECTORY_ID, new_incarnation())
        self._directory = DirectoryServer(config=config)
        self._server = LinkServer(secret, me, self._accept, host, config=config)
        self._on_report = on_report

    async def start(self) -> None:
        """Listen on a port that the operating system chooses. Raises OSError."""
        await self._server.start()

    async def close(self) -> None:
        """Stop listening; every process keeps its last table."""
        await self._server.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def entry(self, worker_id: WorkerId) -> WorkerEntry | None:
        """The worker's row, or None before its first report."""
        return next((entry for entry in self._directory.table.entries if entry.address.worker_id == worker_id), None)

    def mark_gone(self, worker_id: WorkerId) -> None:
        """The worker's process is dead: everybody learns it now, and late reports of it change nothing."""
        entry = self.entry(worker_id)
        if entry is not None:
            self._directory.set_gone(worker_id, entry.address.incarnation)

    def _accept(self, link: Link) -> None:
        self._directory.accept(link)
        serve = link.on_message
        assert serve is not None, "the directory serves every link it accepts"

        def hear(message: Message) -> None:
            serve(message)
            if isinstance(message, Report) and self._is_live(message.entry):
                self._on_report(message.entry, time.monotonic())

        link.on_message = hear

    def _is_live(self, reported: WorkerEntry) -> bool:
        entry = self.entry(reported.address.worker_id)
        return entry is not None and entry.address.incarnation == reported.address.incarnation and entry.state is not WorkerState.GONE
