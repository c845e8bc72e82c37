"""The transfer thread: results come back on the loop, in order, and bugs do not stay in the thread."""

import asyncio
import threading
import time
from typing import Any

import pytest

from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, peer_id
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transfer_thread import TransferCallbacks, TransferThread
from kv_transfer.transports.loopback import FaultPlan, LoopbackFabric, LoopbackTransport
from tests.conformance.transport_ends import make_offer
from tests.probing import read_probe
from tests.unit.kv_transfer.test_link import run, until

READER, SOURCE = peer_id("d0", Incarnation(1)), peer_id("p0", Incarnation(2))
BLOCK_BYTES = 262144


class Told:
    """What the callbacks were told, and on which thread."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def note(self, *event: object) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def callbacks(self) -> TransferCallbacks:
        return TransferCallbacks(
            on_done=lambda read_id: self.note("done", read_id),
            on_failed=lambda read_id, error: self.note("failed", read_id, error.code),
            on_destroyed=lambda peer: self.note("destroyed", peer),
        )


def connected(plan: FaultPlan) -> LoopbackTransport:
    fabric = LoopbackFabric(plan, step_s=0.01)
    reader = LoopbackTransport(fabric, READER, PoolMemory(4, BLOCK_BYTES))
    source = LoopbackTransport(fabric, SOURCE, PoolMemory(4, BLOCK_BYTES))
    source.memory.block(BlockId(1))[:1] = b"x"
    reader.open_peer(SOURCE)
    reader.connect_peer(SOURCE, make_offer(source.memory, source.open_peer(READER)))
    return reader


def test_results_come_back_on_the_loop_in_the_order_of_the_commands() -> None:
    async def test() -> None:
        told, transport = Told(), connected(FaultPlan())
        thread = TransferThread(transport, asyncio.get_running_loop(), told.callbacks(), 0.001)
        thread.post(PostRead(1, SOURCE, (BlockId(0),), (BlockId(1),)))
        await until(lambda: told.events)
        thread.destroy(SOURCE)
        thread.post(PostRead(2, SOURCE, (BlockId(0),), (BlockId(1),)))
        await until(lambda: len(told.events) == 3)
        await thread.close()
        assert told.events == [("done", 1), ("destroyed", SOURCE), ("failed", 2, PeerLost.code)]
        assert told.threads == {threading.get_ident()}
        assert bytes(transport.memory.block(BlockId(0))[:1]) == b"x"

    run(test)


def test_a_read_that_hangs_ends_with_the_agent() -> None:
    async def test() -> None:
        told, transport = Told(), connected(FaultPlan(hang_rate=1.0))
        thread = TransferThread(transport, asyncio.get_running_loop(), told.callbacks(), 0.001)
        thread.post(PostRead(1, SOURCE, (BlockId(0),), (BlockId(1),)))
        thread.destroy(SOURCE)
        await until(lambda: told.events)
        await thread.close()
        assert told.events == [("destroyed", SOURCE)]

    run(test)


def test_calls_give_values_and_transfer_errors() -> None:
    async def test() -> None:
        thread = TransferThread(connected(FaultPlan()), asyncio.get_running_loop(), Told().callbacks(), 0.001)
        assert await thread.call(lambda transport: transport.num_in_flight()) == 0
        with pytest.raises(PeerLost):
            await thread.call(lambda transport: read_probe(transport, SOURCE, Incarnation(77), 1.0))
        await thread.close()

    run(test)


def test_a_bug_in_a_transport_reaches_the_loop() -> None:
    async def test() -> None:
        caught: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: caught.append(context.get("exception")))
        thread = TransferThread(connected(FaultPlan()), loop, Told().callbacks(), 0.001)
        thread.post(PostRead(1, SOURCE, (BlockId(0), BlockId(1)), (BlockId(1),)))
        await until(lambda: caught)
        assert isinstance(caught[0], ValueError)
        assert not isinstance(caught[0], TransferError)
        await thread.close()

    run(test)


def test_a_thread_that_hangs_does_not_keep_the_worker_from_ending() -> None:
    hangs = threading.Event()
    began_s = time.monotonic()

    async def test() -> None:
        thread = TransferThread(connected(FaultPlan()), asyncio.get_running_loop(), Told().callbacks(), 0.001)
        calling = asyncio.ensure_future(thread.call(lambda _transport: hangs.wait(6)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await thread.close()
        calling.cancel()

    run(test)
    took_s = time.monotonic() - began_s
    hangs.set()
    assert took_s < 3, "the event loop waited for a thread that its worker had given up"
