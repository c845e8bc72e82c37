"""Which attempts of a request have been here, until their deadline has passed.

A message may arrive after what it would begin has ended. What is not live and not larger than the largest attempt seen was here
before: it is GONE, and is not begun again.
"""

import itertools

from kv_transfer.identity import RequestId, TransferId


class AttemptMemory:
    """The largest attempt of each request that was begun, or cancelled before it began."""

    def __init__(self) -> None:
        self._largest: dict[RequestId, tuple[int, float]] = {}

    def note(self, transfer: TransferId, until_s: float) -> None:
        """This attempt is here, or has been; remember it until `until_s` at least."""
        attempt, known_until_s = self._largest.get(transfer.request_id, (transfer.attempt, until_s))
        self._largest[transfer.request_id] = max(attempt, transfer.attempt), max(known_until_s, until_s)

    def has_seen(self, transfer: TransferId) -> bool:
        """Whether this attempt, or a larger one, was noted."""
        return transfer.request_id in self._largest and self._largest[transfer.request_id][0] >= transfer.attempt

    def forget_until(self, now_s: float) -> None:
        """Drop, oldest first, what need not be remembered any more, up to the first that must be.

        This is asked ten times a second, and a busy worker remembers tens of thousands: it must not look at all of them. One that
        is over sooner than an older one waits for it; deadlines are much alike, so little is kept for long.
        """
        over = list(itertools.takewhile(lambda request_id: self._largest[request_id][1] <= now_s, self._largest))
        for request_id in over:
            del self._largest[request_id]
