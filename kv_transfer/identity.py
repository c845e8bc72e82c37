"""The names that processes call each other by, and the tokens they pass around.

Knows: which strings and numbers identify a request, a worker, a process start and a transfer, and how token ids are packed.
Does not know: who mints them (the router mints attempts, a process mints its own incarnation) or what a token means.
"""

import secrets
import sys
from array import array
from collections.abc import Iterable
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
"""Random 63-bit number, new at each process start, role switch, memory re-registration or weight change."""
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
PeerId = NewType("PeerId", str)
"""One start of one party, "<party_id>@<incarnation in hex>": whom a message goes to."""
PackedTokens = NewType("PackedTokens", bytes)
"""Token ids as little-endian int32, the form that is hashed, sent and sliced without copies of Python integers."""

TOKEN_BYTES = 4


class TransferId(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True):
    """One attempt of one request between one pair of processes; it is in every message about that attempt.

    `source_incarnation` is 0 when the sink fills the prompt itself (source "local").
    """

    request_id: RequestId
    attempt: int
    source_incarnation: Incarnation
    sink_incarnation: Incarnation


def new_incarnation() -> Incarnation:
    """Mint the incarnation of this process start; never 0, which means "no such process"."""
    return Incarnation(secrets.randbits(63) | 1)


def peer_id(party_id: str, incarnation: Incarnation) -> PeerId:
    """The name of one start of one party."""
    return PeerId(f"{party_id}@{incarnation:x}")


def rank_name(worker_id: str, rank: int) -> str:
    """How one rank of a worker introduces itself, and what its log is called after. Rank 0 is the worker for everybody else."""
    return f"{worker_id}.rank{rank}" if rank else worker_id


def pack_tokens(tokens: Iterable[int]) -> PackedTokens:
    """Pack token ids as little-endian int32. Raises OverflowError for an id outside int32."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return PackedTokens(packed.tobytes())


def unpack_tokens(packed: bytes) -> list[int]:
    """The token ids of a packed sequence, new list. Raises ValueError when the length is not a multiple of 4 bytes."""
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def count_tokens(packed: bytes | bytearray) -> int:
    """Number of tokens in a packed sequence."""
    return len(packed) // TOKEN_BYTES
