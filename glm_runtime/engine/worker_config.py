"""What both workers are told about themselves and their network. Values only."""

from dataclasses import dataclass, field

from kv_transfer.config import ProtocolTimers, TransportConfig, WireConfig
from kv_transfer.identity import WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """Who a worker is and whom it must find. Its incarnation is minted by the service, its port by the operating system.

    host: the address to listen on and to be reached at. secret: the cluster's shared secret.
    """

    worker_id: WorkerId
    host: str
    directory_host: str
    directory_port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNetwork:
    """How a worker talks and moves bytes; each part is a section of the cluster's config file."""

    wire: WireConfig = field(default_factory=WireConfig)
    timers: ProtocolTimers = field(default_factory=ProtocolTimers)
    transport: TransportConfig = field(default_factory=TransportConfig)
