"""Every transport through one suite: what `transports/base.py` promises, across two real processes where there are two."""

import time
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId
from kv_transfer.transports.base import ReadOutcome
from tests.conformance.transport_ends import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    READER,
    End,
    LoopbackGroupWorld,
    LoopbackWorld,
    NixlGroupWorld,
    NixlWorld,
    Remote,
    World,
)
from tests.probing import read_probe

WORLDS = {
    "loopback": LoopbackWorld,
    "nixl": NixlWorld,
    "nixl_tcp": lambda: NixlWorld((("engine_config", "TLS=tcp,NET_DEVICES=lo"),)),
    "loopback_2_of_4_ranks": lambda: LoopbackGroupWorld(2, 4),
    "loopback_1_of_2_ranks": lambda: LoopbackGroupWorld(1, 2),
    "loopback_2_ranks_of_1": lambda: LoopbackGroupWorld(2, 1),
    "nixl_2_of_2_ranks": NixlGroupWorld,
}


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World = WORLDS[request.param]()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(world: World) -> tuple[End, Remote]:
    """A reader and a living remote end that nobody may kill."""
    return world.reader(), world.remote(0xA)


def join(reader: End, remote: Remote) -> None:
    """PairHello both ways, then the probe."""
    offer = reader.open(remote.me)
    answer = remote.open(READER)
    remote.connect(READER, offer)
    reader.connect(remote.me, answer)


def read(remote: PeerId, read_id: int, local: list[int], theirs: list[int]) -> PostRead:
    return PostRead(read_id, remote, tuple(map(BlockId, local)), tuple(map(BlockId, theirs)))


def outcomes(reader: End, count: int, within_s: float = 20.0) -> dict[int, ReadOutcome]:
    """Poll until `count` READs have ended."""
    told: dict[int, ReadOutcome] = {}
    end_s = time.monotonic() + within_s
    while len(told) < count and time.monotonic() < end_s:
        for outcome in reader.transport.poll():
            assert outcome.read_id not in told, "an outcome is told once"
            told[outcome.read_id] = outcome
        time.sleep(0.0005)
    assert len(told) == count
    return told


def content(reader: End, block_id: int) -> set[int]:
    return reader.content(block_id)


def test_done_means_that_the_bytes_are_here_and_nowhere_else(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    join(reader, remote)
    for block_id in range(4):
        remote.fill(block_id, 10 + block_id)
        reader.fill(20 + block_id, 0)
    reader.transport.post_read(read(remote.me, 1, [20, 22, 21], [0, 2, 1]))
    told = outcomes(reader, 1)
    assert told == {1: ReadOutcome(1, remote.me, None)}
    assert [content(reader, block_id) for block_id in (20, 21, 22, 23)] == [{10}, {11}, {12}, {0}]
    assert reader.transport.num_in_flight() == 0


def test_many_reads_in_flight_each_end_once(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    join(reader, remote)
    remote.fill(5, 55)
    for read_id in range(30):
        reader.transport.post_read(read(remote.me, 100 + read_id, [read_id], [5]))
    told = outcomes(reader, 30)
    assert all(outcome.error is None for outcome in told.values())
    assert all(content(reader, block_id) == {55} for block_id in range(30))
    assert reader.transport.poll() == []


def test_the_probe_tells_the_right_start_from_another(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    join(reader, remote)
    read_probe(reader.transport, remote.me, Incarnation(0xA), 10.0)
    with pytest.raises(PeerLost, match="pattern"):
        read_probe(reader.transport, remote.me, Incarnation(0xB), 10.0)


def test_an_agent_that_is_made_again_has_the_next_epoch_and_works(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    first = reader.open(remote.me)
    second = reader.open(remote.me)
    assert (second.agent_epoch, second.agent_name != first.agent_name) == (first.agent_epoch + 1, True)
    join(reader, remote)
    remote.fill(7, 77)
    reader.transport.post_read(read(remote.me, 200, [0], [7]))
    assert outcomes(reader, 1)[200].error is None
    assert content(reader, 0) == {77}


def test_an_end_that_only_serves_need_not_connect(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    reader.open(remote.me)
    reader.connect(remote.me, remote.open(READER))
    read_probe(reader.transport, remote.me, Incarnation(0xA), 10.0)


def test_reads_of_a_destroyed_peer_are_never_told_and_new_ones_fail(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    join(reader, remote)
    reader.transport.post_read(read(remote.me, 300, [0], [0]))
    reader.transport.destroy_peer(remote.me)
    reader.transport.destroy_peer(remote.me)
    assert reader.transport.num_in_flight() == 0
    assert reader.transport.poll() == []
    reader.transport.post_read(read(remote.me, 301, [0], [0]))
    assert isinstance(outcomes(reader, 1)[301].error, PeerLost)


def test_a_peer_that_was_never_connected_cannot_be_read(pair: tuple[End, Remote]) -> None:
    reader, _ = pair
    reader.transport.post_read(read(PeerId("nobody@1"), 400, [0], [0]))
    assert isinstance(outcomes(reader, 1)[400].error, PeerLost)
    with pytest.raises(PeerLost):
        read_probe(reader.transport, PeerId("nobody@1"), Incarnation(1), 1.0)


def test_an_offer_with_other_blocks_is_refused(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    reader.open(remote.me)
    offer = remote.open(READER)
    with pytest.raises(TransferError, match="do not fit"):
        reader.connect(remote.me, msgspec.structs.replace(offer, block_bytes=BLOCK_BYTES // 2))
    with pytest.raises(TransferError):
        reader.connect(remote.me, msgspec.structs.replace(offer, agent_name="somebody else"))
    reader.connect(remote.me, offer)


def test_a_peer_may_connect_again_with_a_new_agent(pair: tuple[End, Remote]) -> None:
    reader, remote = pair
    reader.open(remote.me)
    reader.connect(remote.me, remote.open(READER))
    reader.connect(remote.me, remote.open(READER))
    read_probe(reader.transport, remote.me, Incarnation(0xA), 10.0)


def test_no_byte_lands_after_a_peer_was_destroyed(world: World) -> None:
    reader, remote = world.reader(), world.remote(0xC)
    join(reader, remote)
    everything = list(range(NUM_BLOCKS))
    for block_id in everything:
        remote.fill(block_id, 7)
    read_probe(reader.transport, remote.me, Incarnation(0xC), 10.0)
    reader.transport.post_read(read(remote.me, 600, everything, everything))
    reader.transport.destroy_peer(remote.me)
    for block_id in everything:
        reader.fill(block_id, 1)
    time.sleep(0.3)
    assert [content(reader, block_id) for block_id in everything] == [{1}] * NUM_BLOCKS
    # UCX over TCP may abort the process that is read from when a READ is cut off; nothing is asked of it any more.


def test_a_killed_peer_is_an_error_and_its_next_start_is_another_peer(world: World) -> None:
    reader, old = world.reader(), world.remote(0xE)
    join(reader, old)
    read_probe(reader.transport, old.me, Incarnation(0xE), 10.0)
    old.kill()
    reader.transport.post_read(read(old.me, 500, [0], [0]))
    error = outcomes(reader, 1)[500].error
    assert isinstance(error, TransferError)
    reader.transport.destroy_peer(old.me)
    new = world.remote(0xF)
    assert new.me != old.me
    join(reader, new)
    read_probe(reader.transport, new.me, Incarnation(0xF), 10.0)
    new.fill(NUM_BLOCKS - 1, 99)
    reader.transport.post_read(read(new.me, 501, [1], [NUM_BLOCKS - 1]))
    assert outcomes(reader, 1)[501].error is None
    assert content(reader, 1) == {99}
    with pytest.raises(TransferError):
        read_probe(reader.transport, old.me, Incarnation(0xE), 1.0)
