"""The transfers of a rank that is not its worker's first: a thread that does with the rank's transport what rank 0 asks.

Knows: that the rank must end with its transfers. Does not know pairs or READs: rank 0's group does (`transports/group.py`).
"""

import threading
from collections.abc import Callable

from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import Transport
from kv_transfer.transports.ranks import FrameLink, serve_rank


class RankTransfers:
    """Serves `transport`, which reads into `memory`, over `link`, at whose other end rank 0 has a `LinkedRank`.

    The transport is named by `rank_peer` and the pool's probe block holds the pattern of `rank_incarnation`. poll_interval_s: pause
    between two looks at READs in flight. on_fault: called at most once, on the thread, with why the rank cannot go on: rank 0 is gone, or
    a bug. Not called when rank 0 has said CloseRank, nor after close().
    """

    def __init__(
        self, transport: Transport, memory: PoolMemory, link: FrameLink, poll_interval_s: float, on_fault: Callable[[Exception], None]
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._link = link
        self._poll_interval_s = poll_interval_s
        self._on_fault = on_fault
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="transfer", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, or does within the time: after CloseRank."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the connection, and with it the thread and every agent."""
        self._is_closing = True
        self._link.close()

    def _serve(self) -> None:
        try:
            serve_rank(self._transport, self._memory, self._link, self._poll_interval_s)
        except Exception as error:
            # Whatever it is: a rank whose transfers have ended is of no use to its worker.
            if not self._is_closing:
                self._on_fault(error)
