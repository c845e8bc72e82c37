"""The dials of this package: protocol timers, control connections and the byte transport.

Knows: defaults and units. Does no I/O. Each class is one section of the cluster's config file.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtocolTimers:
    """PROTOCOL: Timers. Liveness only: none of them frees memory that a transfer could still touch."""

    repeat_s: float = 1.0
    """An unanswered control message (VALIDATE, RESEND) is said again after this long, with the same id."""
    progress_interval_s: float = 1.0
    """A source says PROGRESS this often until it is RELEASED."""
    no_progress_s: float = 10.0
    """A sink that has heard of its source gives up after this long without PROGRESS or SEAL."""
    lease_s: float = 15.0
    """Sealed blocks are kept this long after the last sign of the sink."""
    keep_interval_s: float = 3.0
    read_suspect_s: float = 5.0
    """A READ in flight this long makes its pair suspect: the router should prefer others."""
    read_destroy_s: float = 30.0
    """A READ in flight this long is ended by destroying that pair's agent."""
    max_reads_per_chunk: int = 4
    """READs of one chunk before the sink gives the source up."""
    credit_output_tokens: int = 512
    """Credit covers the missing prompt and at most this many output tokens."""
    closed_memory_s: float = 600.0
    """How long a transfer that was cancelled before it was opened stays closed (its deadline is unknown)."""
    quarantine_max_share: float = 0.02
    quarantine_max_s: float = 60.0
    """A worker with a larger share of quarantined blocks, or older ones, drains and takes a new incarnation."""
    drain_cap_s: float = 120.0
    """The operator's hard cap on draining; then everything is cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    """Control connections between processes."""

    max_frame_bytes: int = 64 * 1024 * 1024
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Bytes that may wait for a peer that does not read; one more frame means the peer is lost."""
    hello_timeout_s: float = 2.0
    """An accepted connection that has not proven the secret by then is closed."""
    dial_timeout_s: float = 3.0
    ping_interval_s: float = 1.0
    silence_timeout_s: float = 5.0
    """A connection is closed after this much silence, counted only while our own loop was alive."""
    redial_min_s: float = 0.05
    redial_max_s: float = 2.0
    """Bounds of the jittered exponential back-off between two dials."""
    reconnect_grace_s: float = 1.0
    """A closed socket means a lost peer only when the same peer has not come back by then."""
    report_interval_s: float = 1.0
    """A worker repeats its directory row this often, changed or not."""
    table_interval_s: float = 0.05
    """The directory pushes at most one table to a subscriber in this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """The byte transport. `ucx_options` go to the UCX backend unchanged, e.g. {"num_workers": "1"}.

    destroying_proven: whether destroying an agent is proven to stop its bytes on this network (TRANSFER.md: UCX over CMA or
    TCP on one host). Where it is not, blocks under an aborted READ stay quarantined until the process exits.
    """

    kind: Literal["nixl"] = "nixl"
    progress_delay_us: int = 1000
    """Pause of NIXL's progress thread between two polls; 0 would spin a core."""
    poll_interval_s: float = 0.0005
    ucx_options: tuple[tuple[str, str], ...] = ()
    destroying_proven: bool = True
    rank_timeout_s: float = 30.0
    """A rank of one's own worker whose transport has not answered by then is lost, and with it the worker."""
