"""What a request asks of the shell around it (`relay.py`), as values.

Knows: what can be asked. Does not know when (`request_flow.py`) or how it is carried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import ServingError
from kv_transfer.identity import TransferId
from kv_transfer.messages import FinishReason, Message, TokenLogprobs
from router.lifecycle import RequestState
from router.policy import Placement, WorkerRef


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message; without a connection it is lost, and a timer repeats it."""

    worker: WorkerRef
    message: Message


@dataclass(frozen=True, slots=True)
class Leave:
    """The attempt is over for us: cancel it at `workers` until they say that it is closed, and release its bookings.

    workers: those that were told of it. owes_prefill: whether its work is still booked on the prefill worker.
    """

    transfer: TransferId
    placement: Placement
    workers: tuple[WorkerRef, ...]
    owes_prefill: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client, and whether they are the last; with log-probabilities where they were asked for."""

    tokens: Sequence[int]
    finish: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The first token of this attempt is there: prefill owes it nothing more."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class SinkWasBusy:
    """Decode has no credit for anybody until then."""

    worker: WorkerRef
    until_s: float


@dataclass(frozen=True, slots=True)
class SinkHadRoom:
    """Decode granted credit."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal state. error is None when every token was delivered, or the client wanted no more."""

    state: RequestState
    reason: str
    error: ServingError | None


FlowEffect = Post | Leave | Deliver | PrefillDone | SinkWasBusy | SinkHadRoom | Ended
