"""Runs a transport off the control loop: on one host a READ is a synchronous copy, and the loop must not wait for it.

Knows: one thread, its commands and how results get back to the loop. Does not know what a READ is for (`session.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.errors import TransferError
from kv_transfer.handoff import PostRead
from kv_transfer.identity import PeerId
from kv_transfer.transports.base import Transport

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCallbacks:
    """All are called on the loop. on_destroyed means that the READs of the peer which have not ended yet never will."""

    on_done: Callable[[int], None]
    on_failed: Callable[[int, TransferError], None]
    on_destroyed: Callable[[PeerId], None]


class TransferThread:
    """The one thread that touches `transport`. Methods are called on the loop and return at once."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, callbacks: TransferCallbacks, poll_interval_s: float) -> None:
        raise NotImplementedError

    def post(self, read: PostRead) -> None:
        """Start a READ; on_done or on_failed answers."""
        raise NotImplementedError

    def destroy(self, peer: PeerId) -> None:
        """Destroy the peer's agent after every command given before; on_destroyed answers."""
        raise NotImplementedError

    async def call(self, function: Callable[[Transport], ResultT]) -> ResultT:
        """Run `function(transport)` on the thread, e.g. open_peer, connect_peer or read_probe; its exception comes back."""
        raise NotImplementedError

    async def close(self) -> None:
        """Finish the commands given before, close the transport and join the thread."""
        raise NotImplementedError
