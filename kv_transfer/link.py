"""Authenticated control connections: who is at the other end, whether it is alive, and its messages.

Both sides open with a Challenge, prove the cluster's secret over both nonces, then exchange messages and a PING each second.
Knows: proof, liveness, redialling. Does not know what a message means. Needs the standard library and msgspec only.
"""

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.config import WireConfig
from kv_transfer.errors import ServingError
from kv_transfer.identity import Incarnation, PeerId, peer_id
from kv_transfer.messages import Message, PartyKind, Ping


class Party(NamedTuple):
    """One start of one process, as it introduces itself."""

    kind: PartyKind
    party_id: str
    incarnation: Incarnation

    @property
    def peer_id(self) -> PeerId:
        """The name that sessions call this party by."""
        return peer_id(self.party_id, self.incarnation)


class Link:
    """One authenticated connection. Set `on_message` and `on_closed` as soon as you are given it; both run on the loop.

    on_message: called with each message, PING included, in order. on_closed: called exactly once, with the reason (None when
    close() was called here), however the connection ended; set late, it is called at once.
    """

    peer: Party
    on_message: Callable[[Message], None]
    on_closed: Callable[[ServingError | None], None]

    def post(self, message: Message) -> None:
        """Queue a message. Raises PeerLost when the connection is closed or the peer does not drain its buffer."""
        raise NotImplementedError

    def close(self) -> None:
        """Flush what is queued and close. Idempotent."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        raise NotImplementedError


def empty_ping() -> Ping:
    """The PING of a party that has nothing to say about itself."""
    return Ping()


class LinkServer:
    """Accepts connections and hands over those that have proven the secret."""

    def __init__(
        self,
        secret: bytes,
        me: Party,
        on_link: Callable[[Link], None],
        host: str,
        port: int = 0,
        *,
        config: WireConfig,
        make_ping: Callable[[], Ping] = empty_ping,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Listen. Raises OSError when the address is taken."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The port that the operating system gave."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening and close every accepted connection."""
        raise NotImplementedError


async def dial(secret: bytes, me: Party, host: str, port: int, *, config: WireConfig, make_ping: Callable[[], Ping] = empty_ping) -> Link:
    """Open an authenticated connection. Raises PeerLost, AuthenticationFailed or ProtocolMismatch."""
    raise NotImplementedError


class KeptLink:
    """A connection that is dialled again, with jittered back-off, whenever it ends, until close().

    on_up(link): connected; set the link's on_message here (on_closed belongs to KeptLink). on_down(): the connection of the
    last on_up has ended. With `incarnation` a connection to any other start of the peer is refused and dialled again.
    """

    def __init__(
        self,
        secret: bytes,
        me: Party,
        host: str,
        port: int,
        *,
        on_up: Callable[[Link], None],
        on_down: Callable[[], None],
        config: WireConfig,
        rng: random.Random,
        incarnation: Incarnation | None = None,
        make_ping: Callable[[], Ping] = empty_ping,
    ) -> None:
        raise NotImplementedError

    @property
    def link(self) -> Link | None:
        """The connection, while it is up."""
        raise NotImplementedError

    def start(self) -> asyncio.Task[None]:
        """Begin to dial; the task ends with close()."""
        raise NotImplementedError

    def retarget(self, host: str, port: int, incarnation: Incarnation | None) -> None:
        """The peer moved or restarted: leave the old connection if it is to another place, and dial at once."""
        raise NotImplementedError

    def post(self, message: Message) -> None:
        """Queue a message. Raises PeerLost while the connection is down."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connection and stop dialling."""
        raise NotImplementedError
