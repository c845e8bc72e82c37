"""A probe READ from start to end, for tests that have a transport in their own hands."""

import time

from kv_transfer.errors import TransferTimeout
from kv_transfer.identity import Incarnation, PeerId
from kv_transfer.transports.base import Transport


def read_probe(transport: Transport, peer: PeerId, incarnation: Incarnation, deadline_s: float) -> None:
    """Raises what the transport raises, and TransferTimeout when the probe is not back in time."""
    end_s = time.monotonic() + deadline_s
    transport.start_probe(peer)
    while not transport.is_probe_back(peer, incarnation):
        if time.monotonic() > end_s:
            raise TransferTimeout(f"the probe of {peer} did not end within {deadline_s} s")
        time.sleep(0.001)
