"""What messages say about one worker: where it is, how it is, what it has to do, and whom it is paired with.

Knows: fields and their types. Does not know messages (`messages.py`) or the legal moves of a worker (`router.registry`).
Adding a field with a default at the end is a minor change; anything else raises `layout.PROTOCOL_MAJOR`.
"""

from enum import Enum, unique
from typing import Literal

import msgspec

from kv_transfer.identity import Incarnation, WorkerId


@unique
class WorkerState(Enum):
    """PROTOCOL: Worker. The legal moves are `router.registry.WORKER_TRANSITIONS`."""

    PENDING = "pending"
    STARTING = "starting"
    WARM = "warm"
    SERVING = "serving"
    DRAINING = "draining"
    QUIET = "quiet"
    GONE = "gone"


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the values that messages carry."""


class WorkerAddress(_Part, frozen=True):
    """How to reach one worker's control socket, and which start of it is meant."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: str
    port: int


class WorkerLoad(_Part, frozen=True):
    """What a worker says about itself; rides on PING and on reports to the directory.

    drafted, accepted: by position in a step, tokens guessed and those that held, since start; empty where nothing is drafted.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    blocks_quarantined: int = 0
    num_transfers: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    preemptions: int = 0
    stale_validations: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class PairState(_Part, frozen=True):
    """A decode worker's view of one prefill peer; the router uses a pair only while it is up."""

    worker_id: WorkerId
    incarnation: Incarnation
    up: bool
    bytes_per_s: float = 0.0


class WorkerEntry(_Part, frozen=True):
    """One row of the directory's worker table.

    cache_formats: (component, format) of each kind of cached state. is_pool_audited: since the worker came to rest its pool has been
    recounted block by block, and everything agreed. parallel: how the worker is cut, for people. rank_pids: of its ranks, in their order.
    """

    address: WorkerAddress
    role: Literal["prefill", "decode"]
    state: WorkerState
    fingerprint: str
    pid: int
    load: WorkerLoad
    pairs: tuple[PairState, ...] = ()
    max_model_len_tokens: int = 0
    cache_formats: tuple[tuple[str, str], ...] = ()
    is_pool_audited: bool = False
    parallel: str = ""
    rank_pids: tuple[int, ...] = ()
