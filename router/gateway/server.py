"""Runs the gateway on uvicorn: uvloop, httptools, TCP_NODELAY, and a bounded, ordered shutdown.

Knows: sockets and signals. Does not know routes.
"""

import asyncio
import logging
import math
import socket
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.gateway.app import Gateway

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the idle time of common proxies' and clients' connection pools, so that they, not we, close a connection."""
BACKLOG = 2048


class NoDelayProtocol(HttpToolsProtocol):
    """Sets TCP_NODELAY on each accepted socket: without it a stream's first token waits 40 ms for the client's delayed ACK."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)


class GatewayServer(uvicorn.Server):
    """On SIGTERM: admit nothing more, finish what runs within `drain_s`, cancel the rest, leave the workers, end."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        config = gateway.config
        super().__init__(
            uvicorn.Config(
                gateway.app,
                host=config.host,
                port=config.port,
                http=NoDelayProtocol,
                ws="none",
                proxy_headers=False,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.drain_s),
                backlog=BACKLOG,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """A signal was received: end in order. A second one hurries. Unlike uvicorn's own, the process then ends with code 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets=sockets)
        for server in getattr(self, "servers", []):
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                logger.info("gateway listening host=%s port=%d", host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        self._gateway.start_draining()
        logger.info("gateway draining num_requests=%d drain_s=%g", self._gateway.relay.num_live, self._gateway.config.drain_s)
        await super().shutdown(sockets=sockets)
