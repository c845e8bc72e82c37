"""The outermost layer of every HTTP request: its id, and what is counted about it.

Knows: header `x-request-id` and the names of routes. Does not know what a route does.
"""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.gateway.exchange import REQUEST_ID_KEY
from router.gateway.metrics import GatewayMetrics

SAFE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=\-]{1,128}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Edge:
    """Wraps the application. routes: paths that are counted by their own name; everything else is counted as "other"."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request its id, echo it, count the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _find_request_id(scope)
        scope[REQUEST_ID_KEY] = request_id.decode()
        status = 0

        async def send_tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_tagged)
        finally:
            method, path = scope["method"], scope["path"]
            if path.startswith("/v1/models/"):
                path = "/v1/models/{id}"
            self._metrics.count_http(method if method in METHODS else "other", path if path in self._routes else "other", status or 499)


def _find_request_id(scope: Scope) -> bytes:
    """The client's own id when it is safe to echo, else a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and SAFE_REQUEST_ID.fullmatch(value):
            return bytes(value)
    return secrets.token_hex(12).encode()
