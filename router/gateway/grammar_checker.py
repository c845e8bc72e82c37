"""Asks the checking process about grammars, remembers its answers, and starts it again when a grammar has ended it.

Knows: what a client is told. Does not know grammars (`grammar_check.py` does, in its own process).
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from kv_transfer.errors import InvalidRequest, QueueFull
from kv_transfer.grammar import GrammarSpec
from router.gateway.grammar_fields import AskedGrammar
from router.gateway.grammar_frames import LENGTH_BYTES, CheckReply, CheckRequest, frame

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 256
MAX_WAITING = 64
"""One grammar is looked at at a time. Good ones take a millisecond or two, so only a flood of bad ones makes others wait."""
MAX_REASON_LENGTH = 400
GRACE_S = 5.0
"""Beyond its own limit: starting, and a process that has been stopped from outside."""


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A constraint that workers will accept. param: the field that asked for it. warnings: what of it is not enforced."""

    param: str
    spec: GrammarSpec
    warnings: tuple[str, ...]


class GrammarChecker:
    """One checking process, started with the first grammar. Belongs to one event loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[tuple[str, str, bool], CheckReply] = OrderedDict()
        self.num_lost = 0

    async def check(self, asked: AskedGrammar) -> CheckedGrammar:
        """Raises InvalidRequest that names the field and the reason, QueueFull when too many wait."""
        key = (asked.notation.value, asked.text, asked.is_lenient)
        reply = self._known.get(key)
        if reply is None:
            reply = await self._ask(CheckRequest(*key, limit_s=self._limit_s))
            self._known[key] = reply
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if reply.spec is None:
            reason = " ".join(reply.error.split())[:MAX_REASON_LENGTH]
            raise InvalidRequest(f"{asked.param} cannot be used: {reason}", param=asked.param)
        return CheckedGrammar(asked.param, reply.spec, (*asked.notes, *reply.warnings))

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _ask(self, request: CheckRequest) -> CheckReply:
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} grammars wait to be checked; try again", retry_after_s=self._limit_s)
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._exchange(request)
        finally:
            self._num_waiting -= 1

    async def _exchange(self, request: CheckRequest) -> CheckReply:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(request.limit_s + GRACE_S):
                process.stdin.write(frame(msgspec.msgpack.encode(request)))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=CheckReply)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self.num_lost += 1
            code = await self._end()
            logger.warning("a grammar has ended its checker code=%s num_bytes=%d", code, len(request.text))
            if code == -signal.SIGALRM:
                return CheckReply(f"it takes longer than {request.limit_s:g} s to compile; simplify it")
            return CheckReply("it takes too much memory or time to compile; simplify it")
        except BaseException:  # the asker has gone: the answer on its way must not become the next asker's
            await self._end()
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "router.gateway.grammar_check",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        return self._process

    async def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # nothing is lost with it, and one that has ended by itself keeps its code
        return await process.wait()
