"""The other end of `engine_process.py` in Python: reads commands, has an engine obey them, answers.

Answers go to the stdout that the process was started with; what libraries print goes to stderr.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol


class Engine(Protocol):
    """What a Python engine offers, in the words of `engine_process.py`. Tokens of `decode` are [steps][batch]."""

    def log_probs(self, tokens: list[int]) -> Sequence[float]: ...
    def prefill(self, tokens: list[int]) -> float: ...
    def fill(self, batch: int, tokens: list[int]) -> None: ...
    def decode(self, steps: list[list[int]]) -> Sequence[float]: ...


Obey = Callable[[str, list[int]], Sequence[float]]


def serve(load: Callable[[], Engine], also: Callable[[Engine, str, list[int]], Sequence[float]] | None = None) -> None:
    """Load the engine and obey until the input ends. `also` obeys commands that only this engine knows."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        obey = _Loop(load(), also)
        print("ok", file=answers)
        for line in sys.stdin:
            command, *words = line.split()
            try:
                numbers = obey(command, [int(word) for word in words])
            except Exception as error:  # the boundary of the process: said to the other end, which decides
                traceback.print_exc()
                print(f"error {type(error).__name__}: {' '.join(str(error).split())}", file=answers)
            else:
                print(" ".join(["ok", *(f"{number:.9g}" for number in numbers)]), file=answers)


class _Loop:
    def __init__(self, engine: Engine, also: Callable[[Engine, str, list[int]], Sequence[float]] | None) -> None:
        self._engine = engine
        self._also = also
        self._batch = 0

    def __call__(self, command: str, numbers: list[int]) -> Sequence[float]:
        if command == "log_probs":
            return self._engine.log_probs(numbers)
        if command == "prefill":
            return (self._engine.prefill(numbers),)
        if command == "fill":
            self._batch, *tokens = numbers
            self._engine.fill(self._batch, tokens)
            return ()
        if command == "decode":
            return self._engine.decode([numbers[start : start + self._batch] for start in range(0, len(numbers), self._batch)])
        if self._also is None:
            raise ValueError(f"unknown command {command}")
        return self._also(self._engine, command, numbers)
