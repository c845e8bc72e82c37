"""When a pool has lost so much to the quarantine that its process should start again. Pure; time is passed in.

Knows: how much is too much, and for how long. Does not know what starting again takes (the workers).
"""

from kv_transfer.block_pool import BlockPool
from kv_transfer.config import ProtocolTimers


class QuarantineWatch:
    """Looks at one pool. Quarantined blocks never come back, so the first of them dates the quarantine."""

    def __init__(self, pool: BlockPool, timers: ProtocolTimers) -> None:
        self._pool = pool
        self._timers = timers
        self._since_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether a larger share of blocks, or any block for longer, is quarantined than the timers allow."""
        num_quarantined = self._pool.num_quarantined
        if num_quarantined == 0:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        is_large = num_quarantined > self._timers.quarantine_max_share * self._pool.num_blocks
        return is_large or now_s - self._since_s > self._timers.quarantine_max_s
