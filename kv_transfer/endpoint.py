"""A worker's place in the control network: its server, its row in the directory, and one connection per peer.

Knows: who is connected, what to do when a peer comes, goes or comes back. Does not know transfers (`source_session.py`,
`sink_session.py`). asyncio only.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryClient
from kv_transfer.errors import PeerLost, ServingError
from kv_transfer.identity import PeerId, WorkerId
from kv_transfer.kept_link import KeptLink
from kv_transfer.link import Link, LinkServer, Party
from kv_transfer.messages import Message, Ping, WorkerAddress, WorkerEntry, WorkerTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointCallbacks:
    """All run on the loop.

    on_message: every message but PING. on_peer_up: first connection of this start of a peer. on_peer_lost: exactly once for
    each on_peer_up, after the last connection has been closed for the reconnect grace, or at once when another start of the
    same party connects. on_table: the directory's table, on every push. make_entry: the row now; its address is replaced by
    the endpoint's own.
    """

    on_message: Callable[[Party, Message], None]
    on_peer_up: Callable[[Party], None]
    on_peer_lost: Callable[[Party], None]
    on_table: Callable[[WorkerTable], None]
    make_entry: Callable[[], WorkerEntry]


@dataclass(slots=True)
class _Peer:
    """One start of a party and its open connections, the newest last."""

    party: Party
    links: list[Link] = field(default_factory=list)
    grace_timer: asyncio.TimerHandle | None = None


class WorkerEndpoint:
    """Server, directory client and kept connections of one worker."""

    def __init__(
        self,
        secret: bytes,
        me: Party,
        *,
        host: str,
        directory_host: str,
        directory_port: int,
        callbacks: EndpointCallbacks,
        config: WireConfig,
        rng: random.Random,
    ) -> None:
        self._secret = secret
        self._me = me
        self._host = host
        self._callbacks = callbacks
        self._config = config
        self._rng = rng
        self._peers: dict[PeerId, _Peer] = {}
        self._kept: dict[WorkerId, KeptLink] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._report_timer: asyncio.TimerHandle | None = None
        self._server = LinkServer(secret, me, self._accept, host, config=config, make_ping=self._ping)
        self._directory = DirectoryClient(secret, me, directory_host, directory_port, callbacks.on_table, config=config, rng=rng)

    async def start(self) -> None:
        """Listen, then begin to report to the directory."""
        await self._server.start()
        await self._directory.start()
        self._beat()

    @property
    def address(self) -> WorkerAddress:
        """Where peers reach this worker; valid after start()."""
        return WorkerAddress(WorkerId(self._me.party_id), self._me.incarnation, self._host, self._server.port)

    def send(self, peer: PeerId, message: Message) -> bool:
        """Post to a connected peer; False when there is no connection (the message is lost)."""
        known = self._peers.get(peer)
        for link in reversed(known.links if known is not None else []):
            try:
                link.post(message)
            except PeerLost as error:
                logger.info("message not sent peer=%s message=%s error=%s", peer, type(message).__name__, error)
            else:
                return True
        return False

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a message could be sent now."""
        known = self._peers.get(peer)
        return known is not None and any(not link.is_closed for link in known.links)

    def keep(self, address: WorkerAddress) -> None:
        """Stay connected to this start of a worker, dialling it; replaces the address known for the same worker."""
        kept = self._kept.get(address.worker_id)
        if kept is not None:
            kept.retarget(address.host, address.port, address.incarnation)
            return
        current: list[Link] = []

        def up(link: Link) -> None:
            current.append(link)
            self._register(link)

        def down() -> None:
            self._unregister(current.pop())

        kept = KeptLink(
            self._secret,
            self._me,
            address.host,
            address.port,
            on_up=up,
            on_down=down,
            config=self._config,
            rng=self._rng,
            incarnation=address.incarnation,
            make_ping=self._ping,
        )
        self._kept[address.worker_id] = kept
        kept.start()

    def forget(self, worker_id: WorkerId) -> None:
        """Stop dialling this worker and close the connection."""
        kept = self._kept.pop(worker_id, None)
        if kept is not None:
            task = asyncio.get_running_loop().create_task(kept.close())
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    def report(self) -> None:
        """The row has changed: tell the directory now."""
        self._directory.report(self._entry())

    async def close(self) -> None:
        """Report once more, then close every connection and stop. No callback runs afterwards."""
        if self._report_timer is not None:
            self._report_timer.cancel()
        self.report()
        for worker_id in list(self._kept):
            self.forget(worker_id)
        await asyncio.gather(*self._retired, self._directory.close(), self._server.close())
        for peer in self._peers.values():
            if peer.grace_timer is not None:
                peer.grace_timer.cancel()
        self._peers.clear()

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _accept(self, link: Link) -> None:
        self._register(link)
        link.on_closed = lambda reason: self._ended(link, reason)

    def _ended(self, link: Link, reason: ServingError | None) -> None:
        logger.info("link ended peer=%s reason=%s", link.peer.peer_id, reason)
        self._unregister(link)

    def _register(self, link: Link) -> None:
        party = link.peer
        for other in [peer for peer in self._peers.values() if peer.party.party_id == party.party_id and peer.party != party]:
            self._lose(other)
        known = self._peers.get(party.peer_id)
        if known is None:
            known = self._peers[party.peer_id] = _Peer(party)
            known.links.append(link)
            self._callbacks.on_peer_up(party)
        else:
            known.links.append(link)
            if known.grace_timer is not None:
                known.grace_timer.cancel()
                known.grace_timer = None
        link.on_message = lambda message: self._receive(link, message)

    def _unregister(self, link: Link) -> None:
        known = self._peers.get(link.peer.peer_id)
        if known is None or link not in known.links:
            return
        known.links.remove(link)
        if not known.links:
            known.grace_timer = asyncio.get_running_loop().call_later(self._config.reconnect_grace_s, self._lose, known)

    def _lose(self, peer: _Peer) -> None:
        """The process behind these connections is taken for dead."""
        if self._peers.get(peer.party.peer_id) is not peer:
            return
        del self._peers[peer.party.peer_id]
        if peer.grace_timer is not None:
            peer.grace_timer.cancel()
        for link in peer.links:
            link.close()
        logger.warning("peer lost peer=%s", peer.party.peer_id)
        self._callbacks.on_peer_lost(peer.party)

    def _receive(self, link: Link, message: Message) -> None:
        if not isinstance(message, Ping) and link.peer.peer_id in self._peers:
            self._callbacks.on_message(link.peer, message)

    # -- what we say about ourselves -----------------------------------------------------------------------------------

    def _entry(self) -> WorkerEntry:
        return msgspec.structs.replace(self._callbacks.make_entry(), address=self.address)

    def _ping(self) -> Ping:
        entry = self._callbacks.make_entry()
        return Ping(entry.load, entry.pairs, entry.state)

    def _beat(self) -> None:
        self.report()
        self._report_timer = asyncio.get_running_loop().call_later(self._config.report_interval_s, self._beat)
