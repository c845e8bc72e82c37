"""Authenticated control connections of blocking calls, between the ranks of one worker.

Frames and proof are those of `wire.py` and `link_proof.py`, without an event loop: a rank's threads do nothing but wait for the next
frame, and a step must not wait for a loop to come round. Knows: connecting, framing, time limits. Does not know what a frame says.
"""

import contextlib
import secrets
import select
import socket
import struct
import threading
import time

from kv_transfer.config import WireConfig
from kv_transfer.errors import PeerLost, ProtocolMismatch, TransferTimeout
from kv_transfer.link_proof import NONCE_BYTES, Handshake, Party, Role
from kv_transfer.messages import decode, encode
from kv_transfer.wire import LENGTH_BYTES, OPENING_FRAME_BYTES

SHORTEST_WAIT_S = 0.001
"""A socket takes a time limit of 0 for "do not wait", and then says so otherwise than when the limit is over."""


class RankLink:
    """One connection; nothing but `prove` is said before its other end is proven. Any thread may send; one at a time receives."""

    def __init__(self, connection: socket.socket, config: WireConfig) -> None:
        connection.setblocking(True)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _timeval(config.silence_timeout_s))
        self._connection = connection
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._max_frame_bytes = OPENING_FRAME_BYTES
        self._is_closed = False

    def fileno(self) -> int:
        """The socket's descriptor: readable when a frame has begun to come, or the end."""
        return self._connection.fileno()

    def prove(self, secret: bytes, me: Party, role: Role, config: WireConfig, timeout_s: float) -> Party:
        """Open the connection within `timeout_s`; returns who is at the other end.

        Raises PeerLost, TransferTimeout, AuthenticationFailed or ProtocolMismatch; then it must be closed.
        """
        deadline_s = time.monotonic() + timeout_s
        handshake = Handshake(secret, me, role, secrets.token_bytes(NONCE_BYTES))
        self.send(encode(handshake.open()))
        while handshake.peer is None:
            frame = self.receive(max(0.0, deadline_s - time.monotonic()))
            for answer in handshake.receive(decode(frame)):
                self.send(encode(answer))
        self._max_frame_bytes = config.max_frame_bytes
        return handshake.peer

    def send(self, frame: bytes) -> None:
        """Send one frame. Raises PeerLost when the peer is gone, or does not read for a silence time-out."""
        try:
            with self._sending:
                self._connection.sendall(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        except OSError as error:
            raise PeerLost(f"a frame of {len(frame)} bytes was not taken: {error or 'too late'}") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next frame. Raises PeerLost when the connection has ended, TransferTimeout when no frame begins within `timeout_s`."""
        if self._is_closed:
            raise PeerLost("the connection is closed")
        if not self._readable.poll(None if timeout_s is None else 1000 * timeout_s):
            raise TransferTimeout(f"nothing came within {timeout_s:g} s")
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if length > self._max_frame_bytes:
            raise ProtocolMismatch(f"a frame of {length} bytes is announced; the limit is {self._max_frame_bytes}")
        return self._exactly(length)

    def close(self) -> None:
        """End the connection; whoever waits for a frame here gets PeerLost. Any thread, often."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                part = self._connection.recv(num_bytes - len(received))
            except OSError as error:
                raise PeerLost(f"the connection ended: {error or 'a frame was left unfinished'}") from error
            if not part:
                raise PeerLost("the connection was closed by the peer")
            received += part
        return bytes(received)


class RankListener:
    """Where the other ranks of a worker connect to; the port is the system's choice."""

    def __init__(self, host: str) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.bind(address)
        self._socket.listen()
        self.host = host
        self.port = int(self._socket.getsockname()[1])

    def accept(self, timeout_s: float, config: WireConfig) -> RankLink:
        """The next connection; its other end has proven nothing. Raises TransferTimeout, PeerLost when `close` was called."""
        try:
            self._socket.settimeout(max(timeout_s, SHORTEST_WAIT_S))
            connection, _ = self._socket.accept()
        except TimeoutError as error:
            raise TransferTimeout(f"nobody has connected within {timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost("nobody is listening any more") from error
        return RankLink(connection, config)

    def close(self) -> None:
        """Listen no more; whoever waits in `accept` gets PeerLost. Any thread, often."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial_rank(secret: bytes, me: Party, host: str, port: int, config: WireConfig, timeout_s: float) -> tuple[RankLink, Party]:
    """Connect to another rank's listener, which may not accept yet: that has `timeout_s`.

    Raises PeerLost when it cannot be reached, and as `RankLink.prove` does.
    """
    try:
        connection = socket.create_connection((host, port), config.dial_timeout_s)
    except OSError as error:
        raise PeerLost(f"{host}:{port} cannot be reached: {error}") from error
    link = RankLink(connection, config)
    try:
        return link, link.prove(secret, me, Role.DIALLER, config, timeout_s)
    except BaseException:
        link.close()
        raise


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int(1e6 * (seconds - whole)))
