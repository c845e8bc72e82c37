"""One HTTP exchange on a hot route, on bare ASGI: body in, reply or event stream out, and whether the client is still there.

Knows: limits and media type of a body, headers of a reply. Does not know what is asked or answered.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from kv_transfer.errors import BodyTooLarge
from router.gateway.errors import UnsupportedMediaType

RawHeaders = Sequence[tuple[bytes, bytes]]
JSON_HEADERS: RawHeaders = ((b"content-type", b"application/json"),)
REQUEST_ID_KEY = "glm.request_id"
"""Where the outermost layer (`edge.py`) puts the request id into the scope."""


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


class Exchange:
    """Reads one body and sends one reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.request_id: str = scope.get(REQUEST_ID_KEY, "")
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.is_started = False

    async def read_json_body(self, max_bytes: int) -> bytes:
        """The whole body. Raises UnsupportedMediaType, BodyTooLarge (while reading, not after), ClientGone."""
        headers = dict(self._scope["headers"])
        media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType(
                f"the content type is {media_type.decode('latin-1') or 'missing'}; send JSON with content-type: application/json"
            )
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedMediaType("the body is compressed; send it as it is")
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > max_bytes:
            raise self._too_large(max_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise self._too_large(max_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self, max_bytes: int) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {max_bytes} bytes; shorten the request")

    def watch(self, on_gone: Callable[[], None]) -> "asyncio.Task[None]":
        """A task that calls `on_gone` when the client goes away. The caller cancels it; the body must have been read."""

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            on_gone()

        return asyncio.get_running_loop().create_task(wait())

    async def reply(self, body: bytes, headers: RawHeaders = JSON_HEADERS, status: int = 200) -> None:
        """The whole answer at once."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, (*headers, length))
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self, headers: RawHeaders) -> None:
        """Status line and headers of an event stream."""
        await self._start(200, headers)

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """More of the stream; waits while the client's window is full, and nobody else does."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.is_started = True
        message: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": [*headers, *self.extra_headers]}
        await self._send(message)
