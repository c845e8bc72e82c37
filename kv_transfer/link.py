"""Authenticated control connections: who is at the other end, whether it is alive, and its messages.

Both sides prove the cluster's secret (`link_proof.py`), then exchange messages and a PING each second.
Knows: accepting, dialling, liveness. Does not know what a message means. Needs the standard library and msgspec only.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

from kv_transfer.config import WireConfig
from kv_transfer.errors import PeerLost, ProtocolMismatch, ServingError
from kv_transfer.link_proof import NONCE_BYTES, Handshake, Role
from kv_transfer.link_proof import Party as Party
from kv_transfer.messages import Message, Ping, decode, encode
from kv_transfer.wire import Connection

logger = logging.getLogger(__name__)

LATE_BEATS = 1.5
"""A beat that comes later than this many intervals was held up by our own loop; the excess is not the peer's silence."""


def empty_ping() -> Ping:
    """The PING of a party that has nothing to say about itself."""
    return Ping()


class Link:
    """One authenticated connection. Set `on_message` and `on_closed` as soon as you are given it; both run on the loop.

    on_message: called with each message, PING included, in order; messages that came before it was set are given at once.
    on_closed: called exactly once, with the reason (None when close() was called here), however the connection ended; set
    after that, it is called at once.
    """

    def __init__(self, peer: Party, connection: Connection, config: WireConfig, make_ping: Callable[[], Ping]) -> None:
        self.peer = peer
        self._connection = connection
        self._config = config
        self._make_ping = make_ping
        self._on_message: Callable[[Message], None] | None = None
        self._on_closed: Callable[[ServingError | None], None] | None = None
        self._early: list[Message] = []
        self._ended = False
        self._reason: ServingError | None = None
        self._silence_s = 0.0
        self._num_bytes_heard = connection.num_bytes_received
        self._loop = asyncio.get_running_loop()
        self._last_beat_s = self._loop.time()
        self._beat_timer = self._loop.call_later(config.ping_interval_s, self._beat)
        connection.max_frame_bytes = config.max_frame_bytes

    @property
    def on_message(self) -> Callable[[Message], None] | None:
        """Who gets the messages."""
        return self._on_message

    @on_message.setter
    def on_message(self, callback: Callable[[Message], None]) -> None:
        self._on_message = callback
        early, self._early = self._early, []
        for message in early:
            callback(message)

    @property
    def on_closed(self) -> Callable[[ServingError | None], None] | None:
        """Who learns of the end."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, callback: Callable[[ServingError | None], None]) -> None:
        self._on_closed = callback
        if self._ended:
            callback(self._reason)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._connection.is_closed

    def post(self, message: Message) -> None:
        """Queue a message. Raises PeerLost when the connection is closed or the peer does not drain its buffer."""
        self._connection.send(encode(message))

    def close(self, error: ServingError | None = None) -> None:
        """Send what is queued and close. Idempotent."""
        self._connection.close(error)

    def take_frame(self, frame: bytes) -> None:
        """Called by the connection's owner with each frame. An unknown message closes the connection."""
        try:
            message = decode(frame)
        except ProtocolMismatch as error:
            logger.warning("link closed after a garbled frame peer=%s error=%s", self.peer.peer_id, error)
            self._connection.close(error)
            return
        if self._on_message is None:
            self._early.append(message)
        else:
            self._on_message(message)

    def take_end(self, reason: ServingError | None) -> None:
        """Called by the connection's owner when the connection is gone."""
        assert not self._ended, "a connection ends once"
        self._ended = True
        self._reason = reason
        self._beat_timer.cancel()
        if self._on_closed is not None:
            self._on_closed(reason)

    def _beat(self) -> None:
        now_s = self._loop.time()
        if self._connection.num_bytes_received != self._num_bytes_heard:
            self._num_bytes_heard = self._connection.num_bytes_received
            self._silence_s = 0.0
        else:
            self._silence_s += min(now_s - self._last_beat_s, LATE_BEATS * self._config.ping_interval_s)
        self._last_beat_s = now_s
        if self._silence_s > self._config.silence_timeout_s:
            self._connection.abort(PeerLost(f"nothing was heard for {self._silence_s:.1f} s", peer=self.peer.peer_id))
        if self.is_closed:
            return
        self._beat_timer = self._loop.call_later(self._config.ping_interval_s, self._beat)
        try:
            self.post(self._make_ping())
        except PeerLost:
            logger.info("ping not sent peer=%s", self.peer.peer_id)


class _Opening:
    """A connection on its way to become a Link: runs the handshake against a deadline."""

    def __init__(
        self,
        secret: bytes,
        me: Party,
        role: Role,
        config: WireConfig,
        make_ping: Callable[[], Ping],
        on_link: Callable[[Link], None],
        on_failed: Callable[[ServingError], None],
    ) -> None:
        self.connection = Connection(config, on_made=self._made, on_frame=self._frame, on_closed=self._closed)
        self._handshake = Handshake(secret, me, role, secrets.token_bytes(NONCE_BYTES))
        self._config = config
        self._make_ping = make_ping
        self._on_link = on_link
        self._on_failed = on_failed
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _made(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.hello_timeout_s, self._too_late)
        self.connection.send(encode(self._handshake.open()))

    def _too_late(self) -> None:
        self.connection.abort(PeerLost(f"the peer did not introduce itself within {self._config.hello_timeout_s} s"))

    def _frame(self, frame: bytes) -> None:
        if self._link is not None:
            self._link.take_frame(frame)
            return
        try:
            for answer in self._handshake.receive(decode(frame)):
                self.connection.send(encode(answer))
        except ServingError as error:
            self.connection.close(error)
            return
        if self._handshake.peer is not None:
            assert self._timer is not None, "a frame comes after the connection was made"
            self._timer.cancel()
            self._link = Link(self._handshake.peer, self.connection, self._config, self._make_ping)
            self._on_link(self._link)

    def _closed(self, reason: ServingError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.take_end(reason)
        else:
            self._on_failed(reason or PeerLost("the connection was closed before the peer introduced itself"))


class LinkServer:
    """Accepts connections and hands over those that have proven the secret."""

    def __init__(
        self,
        secret: bytes,
        me: Party,
        on_link: Callable[[Link], None],
        host: str,
        port: int = 0,
        *,
        config: WireConfig,
        make_ping: Callable[[], Ping] = empty_ping,
    ) -> None:
        self._secret = secret
        self._me = me
        self._on_link = on_link
        self._host = host
        self._port = port
        self._config = config
        self._make_ping = make_ping
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, self._host, self._port)

    @property
    def port(self) -> int:
        """The port that the operating system gave; valid after start()."""
        assert self._server is not None, "the server has not been started"
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and close every accepted connection, flushing each for at most a hello time-out."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.close()
        ends = [asyncio.ensure_future(connection.gone.wait()) for connection in self._connections]
        if ends:
            _, late = await asyncio.wait(ends, timeout=2 * self._config.hello_timeout_s)
            for end in late:
                end.cancel()

    def _accept(self) -> Connection:
        self._connections = {connection for connection in self._connections if not connection.gone.is_set()}
        opening = _Opening(self._secret, self._me, Role.LISTENER, self._config, self._make_ping, self._on_link, self._refused)
        self._connections.add(opening.connection)
        return opening.connection

    def _refused(self, error: ServingError) -> None:
        logger.warning("connection refused code=%s error=%s", error.code, error)


async def dial(secret: bytes, me: Party, host: str, port: int, *, config: WireConfig, make_ping: Callable[[], Ping] = empty_ping) -> Link:
    """Open an authenticated connection. Raises PeerLost, AuthenticationFailed or ProtocolMismatch."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Link] = loop.create_future()

    def succeeded(link: Link) -> None:
        if not opened.done():
            opened.set_result(link)

    def failed(error: ServingError) -> None:
        if not opened.done():
            opened.set_exception(error)

    opening = _Opening(secret, me, Role.DIALLER, config, make_ping, succeeded, failed)
    delivered = False
    try:
        async with asyncio.timeout(config.dial_timeout_s):
            await loop.create_connection(lambda: opening.connection, host, port)
            link = await opened
        delivered = True
        return link
    except TimeoutError:
        raise PeerLost(f"{host}:{port} did not answer within {config.dial_timeout_s} s") from None
    except OSError as error:
        raise PeerLost(f"{host}:{port} cannot be reached: {error}") from error
    finally:
        if not delivered:
            opening.connection.abort()
            opened.cancel()
