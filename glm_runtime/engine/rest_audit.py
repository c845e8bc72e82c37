"""Recounts a worker's pool each time the worker has come to rest, so that a leak does not stay unseen until the drain.

Knows: when a worker rests. Does not know what must agree (`BlockPool.audit`). A recount touches every block, which is why a
worker between two requests of a steady load is left alone.
"""

from kv_transfer.block_pool import BlockPool

REST_S = 1.0
"""How long nothing may live or be held before the recount: it takes about a microsecond a block on the control loop."""


class RestAudit:
    """Called on the control loop, every tick."""

    def __init__(self, pool: BlockPool) -> None:
        self.is_audited = False
        """Whether the pool has been recounted since the worker came to rest, and everything agreed."""
        self._pool = pool
        self._rests_since_s: float | None = None

    def look(self, num_live: int, now_s: float) -> None:
        """num_live: hand-offs of the worker that have not ended. Raises AssertionError when the pool disagrees with itself."""
        if num_live or self._pool.num_held:
            self._rests_since_s = None
            self.is_audited = False
        elif self._rests_since_s is None:
            self._rests_since_s = now_s
        elif not self.is_audited and now_s - self._rests_since_s >= REST_S:
            audit = self._pool.audit()
            assert audit.is_quiesced, f"nothing runs, yet blocks are held: {audit.holders}"
            self.is_audited = True
