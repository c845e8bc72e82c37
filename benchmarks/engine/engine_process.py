"""An engine in a process of its own, driven over its standard input and output: the same commands for ours and for every peer.

One line a command, token ids as decimal words; one line an answer: `ok` and numbers, or `error` and why. After loading, an `ok` alone.

    log_probs IDS           log-probability of every token of the vocabulary after the prompt
    prefill IDS             seconds to compute the prompt from nothing and choose a token
    fill BATCH IDS          the prompt into a fresh context, copied to BATCH sequences; nothing to time
    decode IDS              the batch's tokens of step 0, of step 1 ...; the seconds of each step; the context stays as it was filled

A process, because threads, allocators and gigabytes of one engine must not be the other's; and an engine that is told nothing sleeps.
"""

import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REASON_CHARACTERS = 200
STOP_TIMEOUT_S = 10.0
READ_BYTES = 1 << 20

Tokens = Sequence[int]


class EngineFailed(Exception):
    """An engine that ended, answered with an error, or did not answer in time. system: whose it is."""

    def __init__(self, system: str, what: str) -> None:
        super().__init__(what)
        self.system = system


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """How to start an engine. system: what it is an instance of; variant: its settings, in words."""

    system: str
    variant: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.system} ({self.variant})"


class EngineProcess:
    """One running engine. Start it with `with`: it ends with the block."""

    def __init__(self, spec: EngineSpec, log_dir: Path, *, num_threads: int, timeout_s: float) -> None:
        self.spec = spec
        self._timeout_s = timeout_s
        self._log = log_dir / f"{spec.system}-{spec.variant}.log".replace(" ", "_").replace("/", "_")
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                spec.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, bufsize=0
            )
        self._unread = b""

    def __enter__(self) -> "EngineProcess":
        try:
            self._answer("start")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_probs(self, tokens: Tokens) -> list[float]:
        """fp32, by token."""
        return self.ask("log_probs", tokens)

    def prefill(self, tokens: Tokens) -> float:
        """Seconds."""
        (seconds,) = self.ask("prefill", tokens)
        return seconds

    def fill(self, batch: int, tokens: Tokens) -> None:
        """What `decode` and `experts` then start from."""
        self.ask("fill", [batch, *tokens])

    def decode(self, tokens: Tokens) -> list[float]:
        """Seconds of each step."""
        return self.ask("decode", tokens)

    def ask(self, command: str, numbers: Sequence[int] = ()) -> list[float]:
        """Send one command and wait for its answer. Raises EngineFailed."""
        line = " ".join([command, *map(str, numbers)]) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError as error:
            raise self._failure(f"{command}: {error}") from None
        return self._answer(command)

    def close(self) -> None:
        """End the process: by the end of its input, or by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self, command: str) -> list[float]:
        verdict, _, numbers = self._read_line(command).partition(" ")
        if verdict != "ok":
            raise self._failure(f"{command}: {verdict} {numbers}")
        return [float(number) for number in numbers.split()]

    def _read_line(self, command: str) -> str:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise self._failure(f"{command}: no answer within {self._timeout_s:g} s")
            piece = os.read(self._process.stdout.fileno(), READ_BYTES)
            if not piece:
                raise self._failure(f"{command}: it ended")
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line.decode()

    def _failure(self, what: str) -> EngineFailed:
        """One line: the last one of what the engine has logged is most often the reason."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        reason = f"; {lines[-1].strip()[:REASON_CHARACTERS]} (in {self._log})" if lines else ""
        return EngineFailed(self.spec.system, f"{self.spec.name}: {what.strip()}{reason}")
