"""How two processes prove to each other that they know the cluster's secret, as a value without sockets.

Both open with a Challenge (a nonce and the protocol version). The dialler proves first, so a listener never proves anything to
a stranger; role and identity are under the proof, so an answer cannot be replayed to its author or taken for another's.
"""

import hashlib
import hmac
from enum import Enum, unique
from typing import NamedTuple

import msgspec

from kv_transfer.errors import AuthenticationFailed, ProtocolMismatch
from kv_transfer.identity import Incarnation, PeerId, peer_id
from kv_transfer.layout import PROTOCOL_MAJOR
from kv_transfer.messages import Challenge, Hello, Message, PartyKind

PROTOCOL_MINOR = 1
NONCE_BYTES = 32


class Party(NamedTuple):
    """One start of one process, as it introduces itself."""

    kind: PartyKind
    party_id: str
    incarnation: Incarnation

    @property
    def peer_id(self) -> PeerId:
        """The name that sessions call this party by."""
        return peer_id(self.party_id, self.incarnation)


@unique
class Role(Enum):
    DIALLER = "dialler"
    LISTENER = "listener"


def prove(secret: bytes, role: Role, party: Party, own_nonce: bytes, peer_nonce: bytes) -> bytes:
    """HMAC-SHA256 over role, identity and both nonces."""
    text = ("glm-cluster hello", role.value, party.kind.value, party.party_id, party.incarnation, own_nonce, peer_nonce)
    return hmac.digest(secret, msgspec.msgpack.encode(text), hashlib.sha256)


class Handshake:
    """One side's opening: feed it the peer's messages, send what it returns, until `peer` is set."""

    def __init__(self, secret: bytes, me: Party, role: Role, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES, f"a nonce has {NONCE_BYTES} bytes"
        self.peer: Party | None = None
        self._secret = secret
        self._me = me
        self._role = role
        self._nonce = nonce
        self._peer_nonce: bytes | None = None

    def open(self) -> Challenge:
        """The first message to send."""
        return Challenge(self._nonce, PROTOCOL_MAJOR, PROTOCOL_MINOR)

    def receive(self, message: Message) -> list[Message]:
        """Take the peer's next message. Raises ProtocolMismatch or AuthenticationFailed; then the connection must be closed."""
        if isinstance(message, Challenge) and self._peer_nonce is None:
            return self._challenged(message)
        if isinstance(message, Hello) and self._peer_nonce is not None and self.peer is None:
            return self._greeted(message, self._peer_nonce)
        raise ProtocolMismatch(f"{type(message).__name__} is not what opens a connection at this point")

    def _challenged(self, message: Challenge) -> list[Message]:
        if message.protocol_major != PROTOCOL_MAJOR:
            raise ProtocolMismatch(
                f"the peer speaks protocol {message.protocol_major}.{message.protocol_minor} and this process "
                f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: run the same release on both sides",
                expected=PROTOCOL_MAJOR,
                actual=message.protocol_major,
            )
        if len(message.nonce) != NONCE_BYTES or hmac.compare_digest(message.nonce, self._nonce):
            raise ProtocolMismatch("the peer's nonce is not fresh random bytes")
        self._peer_nonce = message.nonce
        return [self._hello(message.nonce)] if self._role is Role.DIALLER else []

    def _greeted(self, message: Hello, peer_nonce: bytes) -> list[Message]:
        party = Party(message.kind, message.party_id, message.incarnation)
        peer_role = Role.LISTENER if self._role is Role.DIALLER else Role.DIALLER
        expected = prove(self._secret, peer_role, party, peer_nonce, self._nonce)
        if not hmac.compare_digest(expected, message.proof):
            raise AuthenticationFailed("the peer does not know this cluster's secret: give both sides the same secret file")
        self.peer = party
        return [self._hello(peer_nonce)] if self._role is Role.LISTENER else []

    def _hello(self, peer_nonce: bytes) -> Hello:
        proof = prove(self._secret, self._role, self._me, self._nonce, peer_nonce)
        return Hello(self._me.kind, self._me.party_id, self._me.incarnation, proof)
