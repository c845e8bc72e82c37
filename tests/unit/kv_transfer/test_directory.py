"""The worker table: rows, GONE, coalesced pushes, and a client that keeps what it has."""

import asyncio
import random

import msgspec

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryClient, DirectoryServer
from kv_transfer.endpoint import EndpointCallbacks, WorkerEndpoint
from kv_transfer.identity import Incarnation, WorkerId
from kv_transfer.link import LinkServer, Party, dial
from kv_transfer.messages import (
    DrainWorker,
    PartyKind,
    Report,
    Subscribe,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
    WorkerTable,
)
from tests.unit.kv_transfer.test_link import SECRET, Ends, run, until

QUICK = WireConfig(
    ping_interval_s=0.05,
    silence_timeout_s=2.0,
    redial_min_s=0.01,
    redial_max_s=0.05,
    reconnect_grace_s=0.1,
    report_interval_s=0.05,
    table_interval_s=0.02,
)
SUPERVISOR = Party(PartyKind.SUPERVISOR, "supervisor", Incarnation(0x5))


def party(name: str, incarnation: int = 0xA, kind: PartyKind = PartyKind.DECODE) -> Party:
    return Party(kind, name, Incarnation(incarnation))


def entry(name: str, incarnation: int = 0xA, state: WorkerState = WorkerState.SERVING, running: int = 0) -> WorkerEntry:
    address = WorkerAddress(WorkerId(name), Incarnation(incarnation), "127.0.0.1", 1)
    return WorkerEntry(address, "decode", state, "fingerprint", 1, WorkerLoad(num_running=running))


async def start_directory(port: int = 0) -> tuple[DirectoryServer, LinkServer]:
    directory = DirectoryServer(config=QUICK)
    server = LinkServer(SECRET, SUPERVISOR, directory.accept, "127.0.0.1", port, config=QUICK)
    await server.start()
    return directory, server


def client(who: Party, port: int, tables: list[WorkerTable]) -> DirectoryClient:
    return DirectoryClient(SECRET, who, "127.0.0.1", port, tables.append, config=QUICK, rng=random.Random(1))


def test_a_report_reaches_every_subscriber() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        seen: list[WorkerTable] = []
        gateway, worker = client(party("gateway", kind=PartyKind.GATEWAY), server.port, seen), client(party("d0"), server.port, [])
        await gateway.start()
        await worker.start()
        worker.report(entry("d0"))
        await until(lambda: seen and seen[-1].entries)
        assert seen[-1].entries == (entry("d0"),) == directory.table.entries
        await gateway.close()
        await worker.close()
        await server.close()

    run(test)


def test_a_client_keeps_the_last_table_and_reports_again_to_a_new_directory() -> None:
    async def test() -> None:
        _, server = await start_directory()
        port = server.port
        tables: list[WorkerTable] = []
        worker = client(party("d0"), port, tables)
        await worker.start()
        worker.report(entry("d0"))
        await until(lambda: tables and tables[-1].entries)
        await server.close()
        await until(lambda: not worker.is_connected)
        assert worker.table is not None
        assert worker.table.entries == (entry("d0"),)
        directory, server = await start_directory(port)
        await until(lambda: directory.table.entries)
        assert directory.table.entries == (entry("d0"),)
        await worker.close()
        await server.close()

    run(test)


def test_a_dead_start_stays_gone_until_a_new_one_reports() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        directory.put(entry("d0", 0xA))
        directory.set_gone(WorkerId("d0"), Incarnation(0xA))
        directory.put(entry("d0", 0xA))
        assert directory.table.entries[0].state is WorkerState.GONE
        directory.put(entry("d0", 0xB, WorkerState.STARTING))
        assert directory.table.entries[0].state is WorkerState.STARTING
        directory.set_gone(WorkerId("d0"), Incarnation(0xA))
        assert directory.table.entries[0].state is WorkerState.STARTING
        directory.remove(WorkerId("d0"))
        assert directory.table.entries == ()
        await server.close()

    run(test)


def test_many_changes_become_few_pushes_and_none_is_lost() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        tables: list[WorkerTable] = []
        gateway = client(party("gateway", kind=PartyKind.GATEWAY), server.port, tables)
        await gateway.start()
        await until(lambda: tables)
        for running in range(100):
            directory.put(entry("d0", running=running))
        await until(lambda: tables[-1].entries and tables[-1].entries[0].load.num_running == 99)
        assert len(tables) <= 4
        await gateway.close()
        await server.close()

    run(test)


def test_nobody_reports_the_row_of_another() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        ends = Ends()
        ends.take(await dial(SECRET, party("d1"), "127.0.0.1", server.port, config=QUICK))
        ends.links[0].post(Report(entry("d0")))
        await until(lambda: ends.reasons)
        assert directory.table.entries == ()
        await server.close()

    run(test)


class Worker:
    """A WorkerEndpoint and what it is told."""

    def __init__(self, who: Party, directory_port: int) -> None:
        self.me = who
        self.events: list[tuple[str, str]] = []
        self.messages: list[object] = []
        self.row = entry(who.party_id, who.incarnation)
        self.endpoint = WorkerEndpoint(
            SECRET,
            who,
            host="127.0.0.1",
            directory_host="127.0.0.1",
            directory_port=directory_port,
            callbacks=EndpointCallbacks(
                on_message=lambda peer, message: self.messages.append(message),
                on_peer_up=lambda peer: self.events.append(("up", peer.peer_id)),
                on_peer_lost=lambda peer: self.events.append(("lost", peer.peer_id)),
                on_table=lambda table: None,
                make_entry=lambda: self.row,
            ),
            config=QUICK,
            rng=random.Random(1),
        )


def test_an_endpoint_reports_its_own_address_and_talks_both_ways() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        prefill, decode = Worker(party("p0", 0xB, PartyKind.PREFILL), server.port), Worker(party("d0"), server.port)
        await prefill.endpoint.start()
        await decode.endpoint.start()
        await until(lambda: len(directory.table.entries) == 2)
        by_id = {row.address.worker_id: row for row in directory.table.entries}
        assert by_id[WorkerId("p0")].address == prefill.endpoint.address
        assert not decode.endpoint.send(prefill.me.peer_id, Subscribe()), "nobody is connected yet"
        decode.endpoint.keep(by_id[WorkerId("p0")].address)
        await until(lambda: decode.events and prefill.events)
        assert decode.endpoint.send(prefill.me.peer_id, DrainWorker(1.0))
        assert prefill.endpoint.send(decode.me.peer_id, DrainWorker(2.0))
        await until(lambda: prefill.messages and decode.messages)
        assert (prefill.messages, decode.messages) == ([DrainWorker(1.0)], [DrainWorker(2.0)])
        await decode.endpoint.close()
        await until(lambda: prefill.events[-1] == ("lost", decode.me.peer_id))
        await prefill.endpoint.close()
        await server.close()

    run(test)


def test_a_peer_that_comes_back_in_time_was_never_lost_and_a_restarted_one_was() -> None:
    async def test() -> None:
        _, server = await start_directory()
        worker = Worker(party("p0", 0xB, PartyKind.PREFILL), server.port)
        await worker.endpoint.start()
        port = worker.endpoint.address.port
        first = await dial(SECRET, party("d0", 0xA), "127.0.0.1", port, config=QUICK)
        await until(lambda: worker.events)
        first.close()
        second = await dial(SECRET, party("d0", 0xA), "127.0.0.1", port, config=QUICK)
        await asyncio.sleep(2 * QUICK.reconnect_grace_s)
        assert worker.events == [("up", "d0@a")]
        third = await dial(SECRET, party("d0", 0xC), "127.0.0.1", port, config=QUICK)
        await until(lambda: len(worker.events) == 3)
        assert worker.events == [("up", "d0@a"), ("lost", "d0@a"), ("up", "d0@c")]
        await until(lambda: second.is_closed)
        third.close()
        await until(lambda: len(worker.events) == 4)
        assert worker.events[-1] == ("lost", "d0@c")
        await worker.endpoint.close()
        await server.close()

    run(test)


def test_forgetting_a_peer_closes_its_connection() -> None:
    async def test() -> None:
        _, server = await start_directory()
        prefill, decode = Worker(party("p0", 0xB, PartyKind.PREFILL), server.port), Worker(party("d0"), server.port)
        await prefill.endpoint.start()
        await decode.endpoint.start()
        decode.endpoint.keep(prefill.endpoint.address)
        await until(lambda: decode.events)
        assert decode.endpoint.is_connected(prefill.me.peer_id)
        decode.endpoint.forget(WorkerId("p0"))
        await until(lambda: len(decode.events) == 2)
        assert decode.events[-1] == ("lost", prefill.me.peer_id)
        assert not decode.endpoint.is_connected(prefill.me.peer_id)
        await decode.endpoint.close()
        await prefill.endpoint.close()
        await server.close()

    run(test)


def test_a_changed_load_rides_on_the_next_report() -> None:
    async def test() -> None:
        directory, server = await start_directory()
        worker = Worker(party("d0"), server.port)
        await worker.endpoint.start()
        await until(lambda: directory.table.entries)
        worker.row = msgspec.structs.replace(worker.row, load=WorkerLoad(num_running=7))
        await until(lambda: directory.table.entries[0].load.num_running == 7)
        await worker.endpoint.close()
        await server.close()

    run(test)
