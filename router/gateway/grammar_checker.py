"""Asks the checking process about grammars, remembers its answers, and starts it again when a grammar has ended it.

Knows: what a client is told. Does not know grammars (`grammar_check.py` does, in its own process).
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kv_transfer.errors import InvalidRequest, Overloaded, QueueFull
from kv_transfer.grammar import GrammarSpec
from router.gateway.grammar_fields import AskedGrammar
from router.gateway.grammar_frames import LENGTH_BYTES, CheckReply, CheckRequest, frame

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 256
MAX_WAITING = 64
"""One grammar is looked at at a time. Good ones take a millisecond or two, so only a flood of bad ones makes others wait."""
MAX_REASON_LENGTH = 400
WALL_S = 20.0
"""Wall-clock time for an answer beyond its limit of CPU time: starting on a busy machine, and a process that was stopped from outside."""
END_S = 2.0
"""For a process that has closed its output to end. It is not killed at once: asyncio's kill looks whether the process has ended and so
may take its exit code from the thread that waits for it, which then reports 255."""
NUM_TRIES = 2
CHECKER = (sys.executable, "-m", "router.gateway.grammar_check")
GONE = (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError)
"""What says that the process has closed its ends of the pipes."""
FAULTS = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP})
"""How a process ends by what it does itself: out of its memory or its stack. Whatever else ends one comes from outside."""


class CheckerUnavailable(Overloaded):
    """The checking process cannot be started, does not answer, or was ended from outside."""

    code = "grammar_checker_unavailable"


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A constraint that workers will accept. param: the field that asked for it. warnings: what of it is not enforced."""

    param: str
    spec: GrammarSpec
    warnings: tuple[str, ...]


class GrammarChecker:
    """One checking process, started with the first grammar. Belongs to one event loop."""

    def __init__(self, limit_s: float, *, wall_s: float = WALL_S, end_s: float = END_S, command: Sequence[str] = CHECKER) -> None:
        self._limit_s = limit_s
        self._wall_s = wall_s
        self._end_s = end_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[tuple[str, str, bool], CheckReply] = OrderedDict()
        self.num_lost = 0

    async def check(self, asked: AskedGrammar) -> CheckedGrammar:
        """Raises InvalidRequest that names the field and the reason, QueueFull when too many wait, CheckerUnavailable."""
        key = (asked.notation.value, asked.text, asked.is_lenient)
        reply = self._known.get(key)
        if reply is None:
            request = CheckRequest(*key, limit_s=self._limit_s)
            reply = await self._ask(request)
            if reply is None:
                reply = CheckReply("it takes too much memory to compile; simplify it")
            else:
                self._remember(key, reply)
        else:
            self._known.move_to_end(key)
        if reply.spec is None:
            reason = " ".join(reply.error.split())[:MAX_REASON_LENGTH]
            raise InvalidRequest(f"{asked.param} cannot be used: {reason}", param=asked.param)
        return CheckedGrammar(asked.param, reply.spec, (*asked.notes, *reply.warnings))

    def _remember(self, key: tuple[str, str, bool], reply: CheckReply) -> None:
        self._known[key] = reply
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _ask(self, request: CheckRequest) -> CheckReply | None:
        """None when it ends every checker by a fault."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} grammars wait to be checked; try again", retry_after_s=self._limit_s)
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._try(request)
        finally:
            self._num_waiting -= 1

    async def _try(self, request: CheckRequest) -> CheckReply | None:
        """A checker that is lost is replaced and asked once more; only one whose CPU time is used up has given an answer with that."""
        code = None
        for _ in range(NUM_TRIES):
            reply = await self._exchange(request)
            if isinstance(reply, CheckReply):
                return reply
            code = reply
            if code == -signal.SIGPROF:
                return CheckReply(f"it takes longer than {request.limit_s:g} s to compile; simplify it")
        if code in FAULTS:
            return None
        raise CheckerUnavailable("the grammar could not be checked: its checker was lost; try again")

    async def _exchange(self, request: CheckRequest) -> CheckReply | int | None:
        """The answer, or the exit code of a checker that gave none (None where none was started)."""
        try:
            async with asyncio.timeout(request.limit_s + self._wall_s):
                process = await self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(frame(msgspec.msgpack.encode(request)))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=CheckReply)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, msgspec.DecodeError) as error:
            self.num_lost += 1
            code = await self._end(wait_s=self._end_s if isinstance(error, GONE) else 0.0)
            logger.warning("a grammar checker was lost code=%s reason=%s num_bytes=%d", code, type(error).__name__, len(request.text))
            return code
        except BaseException:  # the asker has gone: the answer on its way must not become the next asker's
            await self._end()
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        return self._process

    async def _end(self, *, wait_s: float = 0.0) -> int | None:
        """Wait this long for the process to end by itself, then kill it. Returns its exit code; None where there is no process."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            async with asyncio.timeout(wait_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # nothing is lost with it
            code = await process.wait()
        return code
