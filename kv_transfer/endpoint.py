"""A worker's place in the control network: its server, its row in the directory, and one connection per peer.

Knows: who is connected, what to do when a peer comes, goes or comes back. Does not know transfers (`session.py`). asyncio only.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.config import WireConfig
from kv_transfer.identity import PeerId, WorkerId
from kv_transfer.link import Party
from kv_transfer.messages import Message, WorkerAddress, WorkerEntry, WorkerTable


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointCallbacks:
    """All run on the loop.

    on_message: every message but PING. on_peer_up: first connection of this start of a peer. on_peer_lost: exactly once for
    each on_peer_up, after the last connection has been closed for the reconnect grace, or at once when a later start of the
    same party connects. on_table: the directory's table, on every push. make_entry: the row now, without its address filled in
    (`WorkerEntry.address.port` is set by the endpoint).
    """

    on_message: Callable[[Party, Message], None]
    on_peer_up: Callable[[Party], None]
    on_peer_lost: Callable[[Party], None]
    on_table: Callable[[WorkerTable], None]
    make_entry: Callable[[], WorkerEntry]


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
        raise NotImplementedError

    async def start(self) -> None:
        """Listen, then begin to report to the directory."""
        raise NotImplementedError

    @property
    def address(self) -> WorkerAddress:
        """Where peers reach this worker; valid after start()."""
        raise NotImplementedError

    def send(self, peer: PeerId, message: Message) -> bool:
        """Post to a connected peer; False when there is no connection (the message is lost)."""
        raise NotImplementedError

    def keep(self, address: WorkerAddress) -> None:
        """Stay connected to this start of a worker, dialling it; replaces the address known for the same worker."""
        raise NotImplementedError

    def forget(self, worker_id: WorkerId) -> None:
        """Stop dialling this worker and close the connection."""
        raise NotImplementedError

    def report(self) -> None:
        """The row has changed: tell the directory now."""
        raise NotImplementedError

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a message could be sent now."""
        raise NotImplementedError

    async def close(self) -> None:
        """Report once more, then close every connection and stop."""
        raise NotImplementedError
