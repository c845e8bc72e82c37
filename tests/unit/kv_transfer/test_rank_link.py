"""Blocking connections between ranks: proof of the secret, framing, time limits and ends. Real sockets on loopback."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kv_transfer.config import WireConfig
from kv_transfer.errors import AuthenticationFailed, PeerLost, ProtocolMismatch, ServingError, TransferTimeout
from kv_transfer.identity import Incarnation
from kv_transfer.link_proof import Party, Role
from kv_transfer.messages import PartyKind
from kv_transfer.rank_link import RankLink, RankListener, dial_rank
from kv_transfer.wire import LENGTH_BYTES

SECRET = b"a cluster's secret"
LEADER = Party(PartyKind.DECODE, "decode-0", Incarnation(0xD))
FOLLOWER = Party(PartyKind.DECODE, "decode-0.rank1", Incarnation(0xE))
QUICK = WireConfig(hello_timeout_s=0.3, dial_timeout_s=0.5, silence_timeout_s=0.3, max_frame_bytes=1 << 20)


@dataclass
class Pair:
    """Both ends of one connection, and who each says the other is."""

    leader: RankLink
    follower: RankLink
    seen: tuple[Party, Party]


@pytest.fixture
def listener() -> Iterator[RankListener]:
    listener = RankListener("127.0.0.1")
    yield listener
    listener.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def pair(listener: RankListener, threads: ThreadPoolExecutor) -> Iterator[Pair]:
    dialling = threads.submit(dial_rank, SECRET, FOLLOWER, "127.0.0.1", listener.port, QUICK, 2.0)
    leader = listener.accept(2.0, QUICK)
    follower_seen = leader.prove(SECRET, LEADER, Role.LISTENER, QUICK, 2.0)
    follower, leader_seen = dialling.result()
    yield Pair(leader, follower, (follower_seen, leader_seen))
    leader.close()
    follower.close()


def test_both_ends_know_each_other_and_frames_arrive_in_order(pair: Pair) -> None:
    assert pair.seen == (FOLLOWER, LEADER)
    frames = [b"", b"x", b"y" * 100_000]
    for frame in frames:
        pair.leader.send(frame)
    assert [pair.follower.receive(1.0) for _ in frames] == frames
    pair.follower.send(b"back")
    assert pair.leader.receive() == b"back"


def test_frames_of_two_threads_do_not_mix(pair: Pair, threads: ThreadPoolExecutor) -> None:
    sending = [threads.submit(lambda byte=byte: [pair.follower.send(byte * 900_000) for _ in range(20)]) for byte in (b"a", b"b")]
    frames = [pair.leader.receive(2.0) for _ in range(40)]
    assert [future.result() for future in sending]
    assert sorted(frames) == [b"a" * 900_000] * 20 + [b"b" * 900_000] * 20


def test_who_dials_waits_for_a_listener_that_is_busy(listener: RankListener, threads: ThreadPoolExecutor) -> None:
    dialling = threads.submit(dial_rank, SECRET, FOLLOWER, "127.0.0.1", listener.port, QUICK, 5.0)
    time.sleep(3 * QUICK.hello_timeout_s)
    leader = listener.accept(2.0, QUICK)
    assert leader.prove(SECRET, LEADER, Role.LISTENER, QUICK, 2.0) == FOLLOWER
    follower, _ = dialling.result()
    leader.close()
    follower.close()


def test_who_does_not_know_the_secret_is_refused(listener: RankListener, threads: ThreadPoolExecutor) -> None:
    dialling = threads.submit(dial_rank, b"another secret", FOLLOWER, "127.0.0.1", listener.port, QUICK, 2.0)
    leader = listener.accept(2.0, QUICK)
    with pytest.raises(AuthenticationFailed):
        leader.prove(SECRET, LEADER, Role.LISTENER, QUICK, QUICK.hello_timeout_s)
    leader.close()
    with pytest.raises(PeerLost):
        dialling.result()


def test_who_says_nothing_is_given_up(listener: RankListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)):
        leader = listener.accept(2.0, QUICK)
        with pytest.raises(TransferTimeout):
            leader.prove(SECRET, LEADER, Role.LISTENER, QUICK, QUICK.hello_timeout_s)
        leader.close()


def test_a_stranger_cannot_announce_a_large_frame(listener: RankListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall((5000).to_bytes(LENGTH_BYTES, "little"))
        leader = listener.accept(2.0, QUICK)
        with pytest.raises(ProtocolMismatch, match="5000"):
            leader.prove(SECRET, LEADER, Role.LISTENER, QUICK, QUICK.hello_timeout_s)
        leader.close()


def test_nobody_there(listener: RankListener) -> None:
    with pytest.raises(TransferTimeout):
        listener.accept(0.05, QUICK)
    with pytest.raises(TransferTimeout):
        listener.accept(0.0, QUICK)
    listener.close()
    with pytest.raises(PeerLost):
        dial_rank(SECRET, FOLLOWER, "127.0.0.1", listener.port, QUICK, 2.0)


def test_a_silent_peer_is_no_lost_one(pair: Pair) -> None:
    with pytest.raises(TransferTimeout):
        pair.leader.receive(0.05)
    pair.follower.send(b"late")
    assert pair.leader.receive(1.0) == b"late"


def test_an_unfinished_frame_ends_in_time(listener: RankListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as peer:
        link = listener.accept(2.0, QUICK)
        peer.sendall((100).to_bytes(LENGTH_BYTES, "little") + b"half")
        with pytest.raises(PeerLost):
            link.receive()
        link.close()


def test_a_peer_that_does_not_read_is_lost(pair: Pair) -> None:
    with pytest.raises(PeerLost):
        send_much(pair.leader)


def send_much(link: RankLink) -> None:
    for _ in range(100):
        link.send(bytes(1 << 20))


def ends_of(pair: Pair) -> dict[str, Callable[[], None]]:
    return {"the peer closes": pair.follower.close, "this side closes": pair.leader.close}


@pytest.mark.parametrize("end", ["the peer closes", "this side closes"])
def test_an_end_wakes_who_waits(pair: Pair, threads: ThreadPoolExecutor, end: str) -> None:
    waiting = threads.submit(pair.leader.receive)
    threading.Timer(0.1, ends_of(pair)[end]).start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        waiting.result(5.0)
    assert time.monotonic() - started_s < 1.0


def test_closing_the_listener_wakes_who_waits(listener: RankListener, threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(listener.accept, 30.0, QUICK)
    time.sleep(0.1)
    listener.close()
    with pytest.raises(ServingError):
        waiting.result(5.0)


def test_ends_can_be_closed_often(pair: Pair) -> None:
    for link in (pair.leader, pair.leader, pair.follower):
        link.close()
    with pytest.raises(PeerLost):
        pair.leader.send(b"x")
    with pytest.raises(PeerLost):
        pair.leader.receive()


def test_the_proven_may_send_what_the_configuration_allows(pair: Pair) -> None:
    pair.follower.send(bytes(QUICK.max_frame_bytes))
    assert len(pair.leader.receive(2.0)) == 1 << 20
    pair.follower.send(bytes(1 + (1 << 20)))
    with pytest.raises(ProtocolMismatch):
        pair.leader.receive(2.0)
