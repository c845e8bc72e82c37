"""Frames over a TCP connection: 4 bytes little-endian length, then that many bytes.

Knows: framing, limits, back-pressure, closing. Does not know what a frame says (`messages.py`) or who sent it (`link.py`).
A peer that does not read cannot make this process hold more than `max_buffered_bytes` for it, nor keep it from closing.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from kv_transfer.config import WireConfig
from kv_transfer.errors import PeerLost, ProtocolMismatch, ServingError

LENGTH_BYTES = 4
OPENING_FRAME_BYTES = 4096
"""Largest frame that a peer may send before it has proven who it is."""


class Connection(asyncio.Protocol):
    """One framed connection; hand it to the event loop as the protocol of a new transport.

    on_frame: called with each whole frame, in order, until the connection is closed. on_closed: called exactly once for every
    connection that was made, with the reason, or None when close() without an error ended it. `is_closed`: no frame can be
    sent or comes any more; `gone`: set when the socket is.
    """

    def __init__(
        self,
        config: WireConfig,
        *,
        on_made: Callable[[], None],
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[ServingError | None], None],
    ) -> None:
        self.max_frame_bytes = OPENING_FRAME_BYTES
        self.num_bytes_received = 0
        self.is_closed = False
        self.gone = asyncio.Event()
        self._config = config
        self._on_made = on_made
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._closed_here = False
        self._error: ServingError | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    # -- called by the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's transports have its surface and not its class
        self._transport = transport
        peer_socket = transport.get_extra_info("socket")
        if peer_socket is not None and peer_socket.family in (socket.AF_INET, socket.AF_INET6):
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.is_closed:
            transport.abort()
        else:
            self._on_made()

    def data_received(self, data: bytes) -> None:
        self.num_bytes_received += len(data)
        self._buffer += data
        position = 0
        while not self.is_closed and len(self._buffer) - position >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[position : position + LENGTH_BYTES], "little")
            if length > self.max_frame_bytes:
                self.close(ProtocolMismatch(f"a frame of {length} bytes is announced; the limit is {self.max_frame_bytes}"))
                break
            end = position + LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[position + LENGTH_BYTES : end])
            position = end
            self._on_frame(frame)
        del self._buffer[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self.gone.set()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        reason = self._error
        if reason is None and not self._closed_here:
            reason = PeerLost(f"the connection was closed by the peer: {exc}" if exc else "the connection was closed by the peer")
        self._on_closed(reason)

    # -- called by the owner -------------------------------------------------------------------------------------------

    def send(self, payload: bytes) -> None:
        """Queue one frame. Raises PeerLost when the connection is closed or too much waits for the peer, which closes it."""
        if self.is_closed or self._transport is None:
            raise PeerLost("the connection is closed")
        assert len(payload) <= self._config.max_frame_bytes, f"a frame of {len(payload)} bytes is over our own limit"
        waiting_bytes = self._transport.get_write_buffer_size()
        if waiting_bytes + len(payload) > self._config.max_buffered_bytes:
            error = PeerLost(f"{waiting_bytes} bytes wait for a peer that does not read; the limit is {self._config.max_buffered_bytes}")
            self.abort(error)
            raise error
        self._transport.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)

    def close(self, error: ServingError | None = None) -> None:
        """Send what is queued, for at most a hello time-out, and close. Idempotent; the first reason counts."""
        if self.is_closed:
            return
        self._end(error)
        if self._transport is None:
            return
        self._transport.close()
        self._abort_timer = asyncio.get_running_loop().call_later(self._config.hello_timeout_s, self._transport.abort)

    def abort(self, error: ServingError | None = None) -> None:
        """Close without sending what is queued."""
        if not self.is_closed:
            self._end(error)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: ServingError | None) -> None:
        self.is_closed = True
        self._closed_here = True
        self._error = error
