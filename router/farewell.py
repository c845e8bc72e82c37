"""Attempts that we have left and whose workers have not yet said that they are closed.

Knows: CANCEL is repeated until CLOSED, GONE, or that start of the worker is no more. Sans I/O. Does not know requests.
"""

from dataclasses import dataclass

from kv_transfer.identity import TransferId
from kv_transfer.messages import Cancel
from router.effects import Post
from router.policy import WorkerRef


@dataclass(slots=True)
class _Farewell:
    reason: str
    next_s: float
    pause_s: float


class Farewells:
    """What is still to be closed, per worker start. A lost connection keeps it for `grace_s`: by then the worker has dropped it."""

    def __init__(self, *, repeat_s: float, max_repeat_s: float, grace_s: float) -> None:
        self._repeat_s = repeat_s
        self._max_repeat_s = max_repeat_s
        self._grace_s = grace_s
        self._open: dict[WorkerRef, dict[TransferId, _Farewell]] = {}
        self._down_since_s: dict[WorkerRef, float] = {}

    def begin(self, worker: WorkerRef, transfer: TransferId, reason: str, now_s: float) -> list[Post]:
        """Cancel one transfer at one worker."""
        self._open.setdefault(worker, {})[transfer] = _Farewell(reason, now_s + self._repeat_s, self._repeat_s)
        return [Post(worker, Cancel(transfer, reason))]

    def answered(self, worker: WorkerRef, transfer: TransferId) -> None:
        """CLOSED or GONE arrived: nothing is held there for this transfer."""
        held = self._open.get(worker)
        if held is not None:
            held.pop(transfer, None)
            if not held:
                del self._open[worker]

    def worker_gone(self, worker: WorkerRef) -> None:
        """This start of the worker is no more, and with it all that it held."""
        self._open.pop(worker, None)
        self._down_since_s.pop(worker, None)

    def link_down(self, worker: WorkerRef, now_s: float) -> None:
        """The connection ended; it may come back."""
        self._down_since_s[worker] = now_s

    def link_up(self, worker: WorkerRef) -> list[Post]:
        """The connection is there again: what was said while it was down is lost, so say it all again."""
        self._down_since_s.pop(worker, None)
        return [Post(worker, Cancel(transfer, item.reason)) for transfer, item in self._open.get(worker, {}).items()]

    def tick(self, now_s: float) -> list[Post]:
        """Repeat what is due, ever more slowly, and drop what a lost connection has settled."""
        for worker in [ref for ref, since_s in self._down_since_s.items() if now_s - since_s >= self._grace_s]:
            self.worker_gone(worker)
        posts = []
        for worker, held in self._open.items():
            if worker in self._down_since_s:
                continue
            for transfer, item in held.items():
                if now_s >= item.next_s:
                    item.pause_s = min(item.pause_s * 2.0, self._max_repeat_s)
                    item.next_s = now_s + item.pause_s
                    posts.append(Post(worker, Cancel(transfer, item.reason)))
        return posts

    @property
    def num_open(self) -> int:
        """Transfers that have not been closed yet, over all workers."""
        return sum(len(held) for held in self._open.values())
