"""What a person at the terminal sees while the cluster starts and stops: one line per event, with the seconds since the start.

On a terminal the last line is live: it says what is still awaited. Elsewhere (a pipe, a service log) only events are written.
"""

import sys
import time
from collections.abc import Iterable
from typing import TextIO


class Progress:
    """Writes to one stream; called from the supervisor's loop only."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._started_at_s = time.monotonic()
        self._is_live = stream.isatty()
        self._has_live_line = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._started_at_s

    def event(self, text: str) -> None:
        """Write one line that stays."""
        self._write(f"{self._erase()}[{self.elapsed_s:5.1f} s] {text}\n")

    def text(self, text: str) -> None:
        """Write lines as they are."""
        self._write(f"{self._erase()}{text}\n")

    def waiting_for(self, names: Iterable[str]) -> None:
        """Show what is still awaited, on a terminal only."""
        if self._is_live:
            self._write(f"{self._erase()}[{self.elapsed_s:5.1f} s] waiting for {', '.join(names)} ...")
            self._has_live_line = True

    def _erase(self) -> str:
        had_live_line, self._has_live_line = self._has_live_line, False
        return "\r\033[K" if had_live_line else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
