"""A connection that is dialled again whenever it ends.

Knows: back-off, and that a peer may move to another address or start again. Does not know what is said on the connection.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.config import WireConfig
from kv_transfer.errors import AuthenticationFailed, PeerLost, ProtocolMismatch, ServingError
from kv_transfer.identity import Incarnation
from kv_transfer.link import Link, Party, dial, empty_ping
from kv_transfer.messages import Message, Ping

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """Where to dial, and which start of the peer must answer (None: any)."""

    host: str
    port: int
    incarnation: Incarnation | None


class KeptLink:
    """A connection that is dialled again, with jittered back-off, whenever it ends, until close().

    on_up(link): connected; set the link's on_message here (on_closed belongs to KeptLink). on_down(): the connection of the
    last on_up has ended. With `incarnation` a connection to any other start of the peer is refused and dialled again.
    """

    def __init__(
        self,
        secret: bytes,
        me: Party,
        host: str,
        port: int,
        *,
        on_up: Callable[[Link], None],
        on_down: Callable[[], None],
        config: WireConfig,
        rng: random.Random,
        incarnation: Incarnation | None = None,
        make_ping: Callable[[], Ping] = empty_ping,
    ) -> None:
        self._secret = secret
        self._me = me
        self._target = Target(host, port, incarnation)
        self._on_up = on_up
        self._on_down = on_down
        self._config = config
        self._rng = rng
        self._make_ping = make_ping
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._complaint = ""

    @property
    def link(self) -> Link | None:
        """The connection, while it is up."""
        return self._link

    @property
    def target(self) -> Target:
        """Where it is connected or tries to."""
        return self._target

    def start(self) -> asyncio.Task[None]:
        """Begin to dial; the task ends with close()."""
        assert self._task is None, "start() is called once"
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def retarget(self, host: str, port: int, incarnation: Incarnation | None) -> None:
        """The peer moved or restarted: leave the old connection if it is to another place, and dial at once."""
        target = Target(host, port, incarnation)
        if target == self._target:
            return
        self._target = target
        if self._link is not None:
            self._link.close()
        self._wake.set()

    def post(self, message: Message) -> None:
        """Queue a message. Raises PeerLost while the connection is down."""
        if self._link is None:
            raise PeerLost(f"{self._target.host}:{self._target.port} is not connected")
        self._link.post(message)

    async def close(self) -> None:
        """Close the connection and stop dialling."""
        self._closing = True
        if self._task is None:
            return
        if self._link is not None:
            self._link.close()
        else:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        back_off_s = self._config.redial_min_s
        while not self._closing:
            link = await self._try_dial()
            if link is None:
                await self._pause(back_off_s * self._rng.uniform(0.5, 1.0))
                back_off_s = min(2 * back_off_s, self._config.redial_max_s)
                continue
            back_off_s = self._config.redial_min_s
            await self._serve(link)
            if not self._closing:
                await self._pause(back_off_s * self._rng.uniform(0.5, 1.0))

    async def _try_dial(self) -> Link | None:
        """A connection to the present target, or None when there is none to be had now."""
        self._wake.clear()
        target = self._target
        try:
            link = await dial(self._secret, self._me, target.host, target.port, config=self._config, make_ping=self._make_ping)
        except (AuthenticationFailed, ProtocolMismatch) as error:
            self._complain(logging.ERROR, error)
            return None
        except PeerLost as error:
            self._complain(logging.INFO, error)
            return None
        wanted = self._target.incarnation
        if target != self._target or (wanted is not None and link.peer.incarnation != wanted):
            link.close()
            return None
        self._complaint = ""
        return link

    async def _serve(self, link: Link) -> None:
        ended = asyncio.Event()
        link.on_closed = lambda _reason: ended.set()
        self._link = link
        try:
            self._on_up(link)
            await ended.wait()
        except PeerLost as error:
            logger.info("connection ended at once peer=%s error=%s", link.peer.peer_id, error)
        finally:
            link.close()
            self._link = None
            self._on_down()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _complain(self, level: int, error: ServingError) -> None:
        """Log a failed dial once, not at each repetition."""
        if str(error) != self._complaint:
            logger.log(level, "dial failed host=%s port=%d code=%s error=%s", self._target.host, self._target.port, error.code, error)
            self._complaint = str(error)
