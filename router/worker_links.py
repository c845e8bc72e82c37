"""One kept connection per worker start, following the directory's table.

Knows: whom to dial and when to stop. Does not know what is said (`relay.py`). Runs on the gateway's asyncio loop.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.config import WireConfig
from kv_transfer.errors import PeerLost
from kv_transfer.kept_link import KeptLink
from kv_transfer.link import Link, Party
from kv_transfer.messages import Message, WorkerEntry, WorkerState
from router.policy import WorkerRef
from router.registry import address_ref

logger = logging.getLogger(__name__)

UNREACHABLE_STATES = frozenset({WorkerState.PENDING, WorkerState.GONE})


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCallbacks:
    """All run on the loop. on_message gets PING too."""

    on_message: Callable[[WorkerRef, Message], None]
    on_up: Callable[[WorkerRef], None]
    on_down: Callable[[WorkerRef], None]


class WorkerLinks:
    """Dials every worker start of the table and leaves those that are no longer in it."""

    def __init__(self, secret: bytes, me: Party, callbacks: LinkCallbacks, *, config: WireConfig, rng: random.Random) -> None:
        self._secret = secret
        self._me = me
        self._callbacks = callbacks
        self._config = config
        self._rng = rng
        self._links: dict[WorkerRef, KeptLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def apply_table(self, entries: Sequence[WorkerEntry]) -> None:
        """Dial what is new, close what is gone."""
        reachable = {
            address_ref(entry.address): entry.address
            for entry in entries
            if entry.state not in UNREACHABLE_STATES and entry.address.port > 0
        }
        for ref in [ref for ref in self._links if ref not in reachable]:
            self._leave(ref)
        for ref, address in reachable.items():
            if ref not in self._links:
                self._join(ref, address.host, address.port)

    def post(self, worker: WorkerRef, message: Message) -> bool:
        """Queue a message; False when there is no connection, and the message is lost."""
        kept = self._links.get(worker)
        if kept is None:
            return False
        try:
            kept.post(message)
        except PeerLost:
            return False
        return True

    async def close(self) -> None:
        """Leave every worker; each then cancels what we opened there."""
        for ref in list(self._links):
            self._leave(ref)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _join(self, ref: WorkerRef, host: str, port: int) -> None:
        def on_up(link: Link) -> None:
            link.on_message = lambda message: self._callbacks.on_message(ref, message)
            logger.info("worker connected worker_id=%s incarnation=%x", ref.worker_id, ref.incarnation)
            self._callbacks.on_up(ref)

        def on_down() -> None:
            logger.info("worker disconnected worker_id=%s incarnation=%x", ref.worker_id, ref.incarnation)
            self._callbacks.on_down(ref)

        kept = KeptLink(
            self._secret,
            self._me,
            host,
            port,
            on_up=on_up,
            on_down=on_down,
            config=self._config,
            rng=self._rng,
            incarnation=ref.incarnation,
        )
        self._links[ref] = kept
        kept.start()

    def _leave(self, ref: WorkerRef) -> None:
        task = asyncio.ensure_future(self._links.pop(ref).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
