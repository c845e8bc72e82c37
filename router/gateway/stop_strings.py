"""Ends a text at the first stop string, without ever showing a part of it.

Knows: what must be held back. Does not know tokens. However the text is cut into pieces, the result is the same.
"""

from collections.abc import Sequence


class StopStrings:
    """Filters one text. The stop string that is complete first wins; among those the longest."""

    __slots__ = ("_held", "_stops", "is_stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The part of the text that may be shown now. After a stop string nothing more is."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        held = self._held + text
        cut = self._find_cut(held)
        if cut is not None:
            self.is_stopped = True
            self._held = ""
            return held[:cut]
        keep = self._find_open(held)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _find_cut(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        ends = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                ends.append((start + len(stop), start))
        return min(ends)[1] if ends else None

    def _find_open(self, text: str) -> int:
        """Where the longest tail begins that could still become a stop string."""
        earliest = len(text)
        for stop in self._stops:
            position = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
            while 0 <= position < earliest:
                if stop.startswith(text[position:]):
                    earliest = position
                    break
                position = text.find(stop[0], position + 1)
        return earliest
