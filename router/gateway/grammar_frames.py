"""What a gateway and its checking process say to each other.

Knows: two values and how they are framed. Imports neither the grammar library nor the gateway.
"""

from typing import BinaryIO

import msgspec

from kv_transfer.grammar import GrammarSpec

LENGTH_BYTES = 4


class CheckRequest(msgspec.Struct, frozen=True, array_like=True):
    """notation: of `grammar_fields.Notation`. limit_s: CPU time that the answer may take."""

    notation: str
    text: str
    is_lenient: bool
    limit_s: float


class CheckReply(msgspec.Struct, frozen=True, array_like=True):
    """error: why the grammar is refused, "" when it is not. spec: as workers read it. warnings: what of it is not enforced."""

    error: str
    spec: GrammarSpec | None = None
    warnings: tuple[str, ...] = ()


def read_frame(stream: BinaryIO) -> bytes | None:
    """One length-prefixed frame; None at the end."""
    header = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(header, "little")) if len(header) == LENGTH_BYTES else None


def frame(body: bytes) -> bytes:
    """The inverse of `read_frame`."""
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
