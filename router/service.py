"""The router as one running thing: directory client, worker links, relay and their clock.

Knows: how the parts are wired, started and stopped. Does not know HTTP or text.
"""

import asyncio
import os
import random
import socket
from dataclasses import dataclass

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryClient
from kv_transfer.identity import new_incarnation
from kv_transfer.link import Party
from kv_transfer.messages import PartyKind, WorkerTable
from router.config import RouterConfig
from router.relay import Relay, RelayHooks
from router.worker_links import LinkCallbacks, WorkerLinks


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryAddress:
    """Where the worker table comes from, and the secret that every connection proves."""

    host: str
    port: int
    secret: bytes


class RouterService:
    """Create it on the loop that it runs on; `start` returns at once, whether or not any worker is there."""

    def __init__(self, config: RouterConfig, directory: DirectoryAddress, hooks: RelayHooks, *, wire: WireConfig, num_recent: int) -> None:
        rng = random.Random()
        me = Party(PartyKind.GATEWAY, f"gateway-{socket.gethostname()}-{os.getpid()}", new_incarnation())
        self._links = WorkerLinks(
            directory.secret,
            me,
            LinkCallbacks(
                on_message=lambda worker, message: self.relay.on_message(worker, message),
                on_up=lambda worker: self.relay.on_link_up(worker),
                on_down=lambda worker: self.relay.on_link_down(worker),
            ),
            config=wire,
            rng=rng,
        )
        self.relay = Relay(config, post=self._links.post, hooks=hooks, num_recent=num_recent)
        self._directory = DirectoryClient(
            directory.secret, me, directory.host, directory.port, self._take_table, config=wire, rng=rng
        )  # fmt: skip
        self._ticking: asyncio.Task[None] | None = None

    @property
    def is_directory_connected(self) -> bool:
        """Whether the worker table is being kept up to date; without it the last one is used."""
        return self._directory.is_connected

    async def start(self) -> None:
        """Begin to dial the directory, and to watch the timers."""
        await self._directory.start()
        self._ticking = asyncio.get_running_loop().create_task(self.relay.run())

    async def close(self) -> None:
        """Give up what is left, say so to the workers, and disconnect."""
        self.relay.close()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._directory.close()
        await self._links.close()

    def _take_table(self, table: WorkerTable) -> None:
        # The relay first: what is gone must not be dialled, and a link that comes up finds its view.
        self.relay.on_table(table)
        self._links.apply_table(table.entries)
