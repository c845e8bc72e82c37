"""Which worker probably has which prefix, learnt from our own decisions.

Knows: block keys per worker, bounded, least recently used out first. Does not know whether the worker still has them: a wrong
guess costs time, never a wrong answer, because workers look keys up in their own index.
"""

from collections.abc import Sequence

from router.policy import WorkerRef


class PrefixIndex:
    """Block keys by worker start.

    Keys are chained, so a key stands for the whole prefix up to it. `record` touches a chain from its end to its start: an ancestor
    is always fresher than its descendants, eviction therefore takes tails first, and every chain that is held is held from its
    first block on. That is what allows `match` to bisect.
    """

    def __init__(self, max_keys_per_worker: int) -> None:
        self._max_keys_per_worker = max_keys_per_worker
        self._keys: dict[WorkerRef, dict[bytes, None]] = {}

    def record(self, worker: WorkerRef, keys: Sequence[bytes]) -> None:
        """Remember that `worker` is about to have the prefix with these block keys."""
        held = self._keys.setdefault(worker, {})
        for key in reversed(keys[: self._max_keys_per_worker]):
            held.pop(key, None)
            held[key] = None
        while len(held) > self._max_keys_per_worker:
            del held[next(iter(held))]

    def match(self, worker: WorkerRef, keys: Sequence[bytes]) -> int:
        """Number of leading blocks that `worker` probably has. Changes nothing."""
        held = self._keys.get(worker)
        if not held or not keys or keys[0] not in held:
            return 0
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def drop(self, worker: WorkerRef) -> None:
        """Forget a worker start: it is gone, or came back empty under another incarnation."""
        self._keys.pop(worker, None)

    def num_keys(self, worker: WorkerRef) -> int:
        """How many keys are remembered for a worker start."""
        return len(self._keys.get(worker, ()))
