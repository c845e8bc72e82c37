"""Connections: proof of the secret, versions, limits, liveness, and exactly one end each. Real sockets on loopback."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from kv_transfer.config import WireConfig
from kv_transfer.errors import AuthenticationFailed, PeerLost, ProtocolMismatch, ServingError
from kv_transfer.identity import Incarnation
from kv_transfer.kept_link import KeptLink
from kv_transfer.link import Link, LinkServer, Party, dial
from kv_transfer.link_proof import NONCE_BYTES, Handshake, Role
from kv_transfer.messages import Challenge, DrainWorker, Hello, Message, PartyKind, Ping, Subscribe, encode

SECRET = b"a cluster's secret"
WORKER = Party(PartyKind.DECODE, "decode-0", Incarnation(0xD))
GATEWAY = Party(PartyKind.GATEWAY, "gateway-0", Incarnation(0x6))
QUICK = WireConfig(
    hello_timeout_s=0.3, dial_timeout_s=0.5, ping_interval_s=0.02, silence_timeout_s=0.1, redial_min_s=0.01, redial_max_s=0.05
)
CALM = WireConfig()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait for the loop to make `condition` true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - tests look at plain values
            await asyncio.sleep(0.002)


class Ends:
    """Records what one side of a connection is told."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.messages: list[Message] = []
        self.reasons: list[ServingError | None] = []

    def take(self, link: Link) -> None:
        self.links.append(link)
        link.on_message = self.messages.append
        link.on_closed = self.reasons.append

    def said(self) -> list[Message]:
        return [message for message in self.messages if not isinstance(message, Ping)]


def post_often(link: Link, message: Message, times: int) -> None:
    for _ in range(times):
        link.post(message)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def serve(ends: Ends, config: WireConfig = CALM, secret: bytes = SECRET) -> LinkServer:
    server = LinkServer(secret, WORKER, ends.take, "127.0.0.1", config=config)
    await server.start()
    return server


def test_both_sides_learn_who_the_other_is_and_get_messages_in_order() -> None:
    async def test() -> None:
        here, there = Ends(), Ends()
        server = await serve(there)
        link = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        here.take(link)
        for seconds in range(50):
            link.post(DrainWorker(float(seconds)))
        await until(lambda: len(there.said()) == 50)
        there.links[0].post(Subscribe())
        await until(lambda: here.said())
        assert link.peer == WORKER
        assert there.links[0].peer == GATEWAY
        assert there.said() == [DrainWorker(float(seconds)) for seconds in range(50)]
        link.close()
        await until(lambda: here.reasons and there.reasons)
        await server.close()
        assert here.reasons == [None]
        assert isinstance(there.reasons[0], PeerLost)
        assert len(there.reasons) == 1
        with pytest.raises(PeerLost):
            link.post(Subscribe())

    run(test)


def test_messages_that_come_before_somebody_listens_are_kept() -> None:
    async def test() -> None:
        def greet(link: Link) -> None:
            link.post(DrainWorker(1.0))
            link.close()

        server = LinkServer(SECRET, WORKER, greet, "127.0.0.1", config=CALM)
        await server.start()
        link = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        await until(lambda: link.is_closed)
        ends = Ends()
        ends.take(link)
        assert ends.messages == [DrainWorker(1.0)]
        assert len(ends.reasons) == 1
        await server.close()

    run(test)


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    async def test() -> None:
        there = Ends()
        server = await serve(there, secret=b"another")
        with pytest.raises((AuthenticationFailed, PeerLost)):
            await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        assert there.links == []
        await server.close()

    run(test)


def test_a_stranger_that_says_nothing_is_closed() -> None:
    async def test() -> None:
        there = Ends()
        server = await serve(there, QUICK)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(2):
            while await reader.read(4096):
                pass
        writer.close()
        await server.close()
        assert there.links == []

    run(test)


def test_a_stranger_may_not_send_large_frames() -> None:
    async def test() -> None:
        there = Ends()
        server = await serve(there)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write((1 << 20).to_bytes(4, "little"))
        async with asyncio.timeout(2):
            while await reader.read(4096):
                pass
        writer.close()
        await server.close()
        assert there.links == []

    run(test)


@pytest.mark.parametrize("frame", [b"\xc1garbage", encode(Subscribe())[:-1], b"", b"\x91\xa7Unknown"])
def test_a_garbled_frame_closes_the_link_and_nothing_else(frame: bytes) -> None:
    async def test() -> None:
        here, there = Ends(), Ends()
        server = await serve(there)
        link = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        here.take(link)
        link._connection.send(frame)
        await until(lambda: there.reasons and here.reasons)
        assert isinstance(there.reasons[0], ProtocolMismatch)
        again = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        assert again.peer == WORKER
        again.close()
        await server.close()

    run(test)


def test_a_silent_peer_is_closed_after_the_time_out() -> None:
    async def test() -> None:
        mute = WireConfig(ping_interval_s=100.0)
        there = Ends()
        server = await serve(there, QUICK)
        link = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=mute)
        await until(lambda: there.reasons)
        assert isinstance(there.reasons[0], PeerLost)
        link.close()
        await server.close()

    run(test)


def test_pings_keep_an_idle_link_alive() -> None:
    async def test() -> None:
        here, there = Ends(), Ends()
        server = await serve(there, QUICK)
        here.take(await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=QUICK))
        await until(lambda: len(there.messages) >= 10)
        assert there.reasons == []
        assert here.reasons == []
        here.links[0].close()
        await server.close()

    run(test)


def test_a_loop_that_was_blocked_does_not_blame_its_peer() -> None:
    async def test() -> None:
        here, there = Ends(), Ends()
        server = await serve(there, QUICK)
        here.take(await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=QUICK))
        await until(lambda: there.messages)
        for _ in range(3):
            time.sleep(3 * QUICK.silence_timeout_s)  # noqa: ASYNC251 - blocking the loop is the point
            await asyncio.sleep(0)
        await asyncio.sleep(2 * QUICK.ping_interval_s)
        assert there.reasons == []
        assert here.reasons == []
        here.links[0].close()
        await server.close()

    run(test)


def test_a_peer_that_does_not_read_is_lost_instead_of_buffered_for() -> None:
    async def test() -> None:
        there = Ends()
        server = await serve(there, WireConfig(max_buffered_bytes=1 << 20))
        link = await dial(SECRET, GATEWAY, "127.0.0.1", server.port, config=CALM)
        assert link._connection._transport is not None
        link._connection._transport.pause_reading()
        flood = Challenge(b"x" * (1 << 18), 1, 0)
        with pytest.raises(PeerLost, match="does not read"):
            post_often(there.links[0], flood, 200)
        await until(lambda: there.reasons)
        assert len(there.reasons) == 1
        link.close()
        await server.close()

    run(test)


def test_dialling_nobody_is_peer_lost() -> None:
    async def test() -> None:
        there = Ends()
        server = await serve(there)
        port = server.port
        await server.close()
        with pytest.raises(PeerLost):
            await dial(SECRET, GATEWAY, "127.0.0.1", port, config=QUICK)

    run(test)


def test_a_kept_link_comes_back_after_its_peer_does() -> None:
    async def test() -> None:
        there, ups, downs = Ends(), [], []
        server = await serve(there, QUICK)
        port = server.port
        kept = KeptLink(
            SECRET, GATEWAY, "127.0.0.1", port, on_up=ups.append, on_down=lambda: downs.append(1), config=QUICK, rng=random.Random(1)
        )
        kept.start()
        await until(lambda: ups)
        await server.close()
        await until(lambda: downs)
        with pytest.raises(PeerLost):
            kept.post(Subscribe())
        again = LinkServer(SECRET, WORKER, there.take, "127.0.0.1", port, config=QUICK)
        await again.start()
        await until(lambda: len(ups) == 2)
        kept.post(Subscribe())
        await until(lambda: there.said())
        await kept.close()
        assert len(downs) == 2
        await again.close()

    run(test)


def test_a_kept_link_goes_to_the_start_it_was_told_and_follows_a_move() -> None:
    async def test() -> None:
        old, new, ups = Ends(), Ends(), []
        server = await serve(old, QUICK)
        restarted = LinkServer(SECRET, WORKER._replace(incarnation=Incarnation(0xE)), new.take, "127.0.0.1", config=QUICK)
        await restarted.start()
        kept = KeptLink(
            SECRET,
            GATEWAY,
            "127.0.0.1",
            server.port,
            on_up=ups.append,
            on_down=lambda: None,
            config=QUICK,
            rng=random.Random(1),
            incarnation=Incarnation(0xE),
        )
        kept.start()
        await until(lambda: len(old.links) >= 2)
        assert ups == [], "another start of the peer is not the one that was meant"
        kept.retarget("127.0.0.1", restarted.port, Incarnation(0xE))
        await until(lambda: ups)
        assert ups[0].peer.incarnation == 0xE
        await kept.close()
        await server.close()
        await restarted.close()

    run(test)


def test_a_kept_link_whose_user_finds_it_closed_already_dials_again() -> None:
    async def test() -> None:
        server = await serve(Ends())
        ups: list[Link] = []

        def up(link: Link) -> None:
            ups.append(link)
            if len(ups) == 1:
                link.close()  # as a peer does that leaves at once
            link.post(Subscribe())

        kept = KeptLink(SECRET, GATEWAY, "127.0.0.1", server.port, on_up=up, on_down=lambda: None, config=QUICK, rng=random.Random(0))
        kept.start()
        await until(lambda: len(ups) == 2)
        await kept.close()
        await server.close()

    run(test)


def test_closing_a_kept_link_while_it_dials_ends_it() -> None:
    async def test() -> None:
        kept = KeptLink(SECRET, GATEWAY, "127.0.0.1", 1, on_up=lambda link: None, on_down=lambda: None, config=QUICK, rng=random.Random(1))
        task = kept.start()
        await asyncio.sleep(0)
        await kept.close()
        assert task.done()

    run(test)


# -- the proof itself, without sockets ---------------------------------------------------------------------------------


def handshakes(dialler_secret: bytes = SECRET, listener_secret: bytes = SECRET) -> tuple[Handshake, Handshake]:
    return (
        Handshake(dialler_secret, GATEWAY, Role.DIALLER, b"d" * NONCE_BYTES),
        Handshake(listener_secret, WORKER, Role.LISTENER, b"l" * NONCE_BYTES),
    )


def test_the_listener_proves_nothing_before_the_dialler_has() -> None:
    dialler, listener = handshakes()
    assert listener.receive(dialler.open()) == []
    (hello,) = dialler.receive(listener.open())
    (answer,) = listener.receive(hello)
    assert dialler.receive(answer) == []
    assert (dialler.peer, listener.peer) == (WORKER, GATEWAY)


@pytest.mark.parametrize("field", ["kind", "party_id", "incarnation"])
def test_an_identity_that_was_not_proven_is_refused(field: str) -> None:
    dialler, listener = handshakes()
    listener.receive(dialler.open())
    (hello,) = dialler.receive(listener.open())
    assert isinstance(hello, Hello)
    other = {"kind": PartyKind.PREFILL, "party_id": "else", "incarnation": Incarnation(1)}
    forged = Hello(**{**{name: getattr(hello, name) for name in hello.__struct_fields__}, field: other[field]})
    with pytest.raises(AuthenticationFailed):
        listener.receive(forged)


def test_an_answer_cannot_be_sent_back_to_its_author() -> None:
    dialler, listener = handshakes()
    challenge = listener.open()
    with pytest.raises(ProtocolMismatch):
        listener.receive(challenge)
    victim = Handshake(SECRET, WORKER, Role.LISTENER, b"v" * NONCE_BYTES)
    victim.receive(Challenge(b"l" * NONCE_BYTES, 1, 0))
    listener.receive(Challenge(b"v" * NONCE_BYTES, 1, 0))
    del dialler
    reflected = listener._hello(b"v" * NONCE_BYTES)
    with pytest.raises(AuthenticationFailed):
        victim.receive(reflected)


def test_another_protocol_major_is_named() -> None:
    dialler, _ = handshakes()
    with pytest.raises(ProtocolMismatch, match=r"protocol 2\.7 and this process 1\."):
        dialler.receive(Challenge(b"l" * NONCE_BYTES, 2, 7))


def test_messages_before_the_proof_are_refused() -> None:
    _, listener = handshakes()
    with pytest.raises(ProtocolMismatch):
        listener.receive(Subscribe())
