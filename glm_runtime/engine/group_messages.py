"""What the ranks of one worker say to each other on their control connections, as msgspec structs.

Knows: fields and their types. Does not know who says what when (`rank_group.py`), nor what crosses between workers
(`kv_transfer/messages.py`). All ranks of a worker are started together from one release, so there are no versions here.
"""

from dataclasses import dataclass

import msgspec

from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.errors import ProtocolMismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTerms:
    """What must be equal on all ranks before they compute together. num_blocks: of each rank's own pool."""

    weights_version: str
    layout_fingerprint: str
    numerics: str
    kernels: str
    num_blocks: int
    max_step_tokens: int
    max_model_len_tokens: int
    max_drafts: int
    verification: str
    num_balance_steps: int


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: a tagged, immutable msgpack array."""


class Join(_Message, frozen=True):
    """Another rank -> the leading one: I am this rank, and was told to be cut like that."""

    rank: int
    layout: ParallelLayout
    pid: int


class Welcome(_Message, frozen=True):
    """Leading rank -> another: meet the ranks of the replica at this port of my host, and load."""

    store_port: int


class Refused(_Message, frozen=True):
    """Leading rank -> another: this rank is none of ours, or not like us."""

    reason: str


class Loaded(_Message, frozen=True):
    """Another rank -> the leading one: the weights are here and the pool is mapped."""

    terms: RankTerms


class Begin(_Message, frozen=True):
    """Leading rank -> another: all are loaded and alike; steps follow. Connect to `transfers_port` of my host for your transfers."""

    transfers_port: int


class Transfers(_Message, frozen=True):
    """Another rank -> the leading one, first on a second connection: it is for the transfers of this rank (`transports/ranks.py`)."""

    rank: int


class Step(_Message, frozen=True):
    """Leading rank -> another: run this, as `plan_codec.py` writes it."""

    plan: bytes


class Stop(_Message, frozen=True):
    """Leading rank -> another: there will be no further step."""


class Failed(_Message, frozen=True):
    """Another rank -> the leading one: I cannot go on, and end."""

    reason: str


class Beat(_Message, frozen=True):
    """Another rank -> the leading one, now and then: I live."""


GroupMessage = Join | Welcome | Refused | Loaded | Begin | Transfers | Step | Stop | Failed | Beat

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[GroupMessage] = msgspec.msgpack.Decoder(GroupMessage)


def encode(message: GroupMessage) -> bytes:
    """A message as the payload of one frame."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> GroupMessage:
    """The message of one frame. Raises ProtocolMismatch."""
    try:
        return _DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(f"what a rank of this worker says is no message: {error}") from error
