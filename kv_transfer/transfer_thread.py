"""Runs a transport off the control loop: on one host a READ is a synchronous copy, and the loop must not wait for it.

Knows: one thread, its commands and how results get back to the loop. Does not know what a READ is for (`sink_session.py`).
"""

import asyncio
import contextlib
import queue
import threading
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
    """The one thread that touches `transport`. Methods are called on the loop and return at once; commands keep their order."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, callbacks: TransferCallbacks, poll_interval_s: float) -> None:
        """poll_interval_s: pause between two looks at READs in flight; without any the thread sleeps."""
        self._transport = transport
        self._loop = loop
        self._callbacks = callbacks
        self._poll_interval_s = poll_interval_s
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def post(self, read: PostRead) -> None:
        """Start a READ; on_done or on_failed answers."""
        self._commands.put(lambda: self._transport.post_read(read))

    def destroy(self, peer: PeerId) -> None:
        """Destroy the peer's agent after every command given before; on_destroyed answers."""

        def command() -> None:
            self._transport.destroy_peer(peer)
            self._tell(self._callbacks.on_destroyed, peer)

        self._commands.put(command)

    async def call(self, function: Callable[[Transport], ResultT]) -> ResultT:
        """Run `function(transport)` on the thread, e.g. open_peer, connect_peer or start_probe; its TransferError comes back."""
        result: asyncio.Future[ResultT] = self._loop.create_future()

        def give(value: ResultT) -> None:
            if not result.done():
                result.set_result(value)

        def refuse(error: TransferError) -> None:
            if not result.done():
                result.set_exception(error)

        def command() -> None:
            try:
                value = function(self._transport)
            except TransferError as error:
                self._tell(refuse, error)
            else:
                self._tell(give, value)

        self._commands.put(command)
        return await result

    async def close(self) -> None:
        """Finish the commands given before, close the transport and end the thread.

        May be given up: a thread that hangs in a transport is a daemon, and nothing else waits for it.
        """
        self._commands.put(None)
        await self._ended.wait()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._transport.close()
        except Exception as error:  # a bug: it must stop the worker, not only this thread
            self._tell(self._raise, error)
        finally:
            self._tell(self._ended.set)

    def _turn(self) -> bool:
        """Carry out one command, if there is one, and tell what has ended; False after close()."""
        waits = self._transport.num_in_flight() > 0
        try:
            command = self._commands.get(timeout=self._poll_interval_s if waits else None)
        except queue.Empty:
            pass
        else:
            if command is None:
                return False
            command()
        for outcome in self._transport.poll():
            if outcome.error is None:
                self._tell(self._callbacks.on_done, outcome.read_id)
            else:
                self._tell(self._callbacks.on_failed, outcome.read_id, outcome.error)
        return True

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has given this thread up
            self._loop.call_soon_threadsafe(callback, *arguments)

    @staticmethod
    def _raise(error: Exception) -> None:
        raise error
