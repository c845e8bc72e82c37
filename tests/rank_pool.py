"""Processes that act as the ranks of a replica, started when first needed and kept for all tests of the session.

`pool.run(layout, function, *args)` calls function(context, *args) on every rank, over real gloo groups, and returns the results in order
of ranks. `function` is of a module, so that a process can find it, and may keep what is expensive, such as a loaded model, in a
`functools.cache`: a process goes on living between runs, as rank 0, 1 ... of whatever layout comes next. Each has one thread of torch.
"""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.process_groups import Store, join_store, make_context, serve_store, within

MOST_RANKS = 8
DEFAULT_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
"""Eight interpreters that import torch on two busy cores."""
GRACE_S = 2.0
"""After one rank has failed, the others may still be waiting for it: what has not answered by then is ended."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RankError:
    """What one rank raised. kind: the exception's class name; "" where the process ended or was ended. trace: with the message."""

    kind: str
    message: str
    trace: str


class RanksFailed(AssertionError):
    """A run in which at least one rank did not return. errors: by rank, the first one to be heard of first."""

    def __init__(self, layout: ParallelLayout, errors: dict[int, RankError]) -> None:
        self.errors = errors
        parts = [f"rank {rank}: {error.trace}" for rank, error in errors.items()]
        super().__init__(
            f"{len(errors)} of {layout.num_ranks} ranks of '{layout.describe()}' failed, the first one first\n" + "\n".join(parts)
        )


class RankPool:
    """Up to `MOST_RANKS` processes. Used by one thread. A failed run leaves it usable: processes that hang or died are replaced."""

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: Store | None = None
        self._generation = 0

    def run(
        self,
        layout: ParallelLayout,
        function: Callable[Concatenate[ParallelContext, Given], Result],
        *args: Given.args,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Result]:
        """function(context, *args) on every rank of the layout. Arguments and results are pickled.

        Raises RanksFailed when a rank raises, ends, or has not returned after `timeout_s`.
        """
        num_ranks = layout.num_ranks
        self._reserve(num_ranks)
        task = pickle.dumps((self._generation, layout, function, args, timeout_s))
        for connection in self._connections[:num_ranks]:
            connection.send_bytes(task)
        answers, errors = self._collect(num_ranks, time.monotonic() + timeout_s)
        if errors:
            # Some may have exchanged more than others: their groups are not used again.
            self._generation += 1
            raise RanksFailed(layout, errors)
        return [answers[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """End all processes."""
        for rank in range(len(self._processes)):
            self._end(rank)
        self._processes.clear()
        self._connections.clear()
        self._store = None

    def process_ids(self) -> list[int]:
        """Of the processes that live, by rank."""
        return [process.pid for process in self._processes]

    def _reserve(self, num_ranks: int) -> None:
        assert num_ranks <= MOST_RANKS, f"{num_ranks} ranks; the pool has at most {MOST_RANKS}"
        if self._store is None:
            self._store = serve_store("127.0.0.1", 1 + MOST_RANKS, START_TIMEOUT_S)
        fresh = [rank for rank in range(num_ranks) if rank >= len(self._processes) or not self._processes[rank].is_alive()]
        for rank in fresh:
            self._start(rank, self._store.port)
        for rank in fresh:
            if not self._connections[rank].poll(START_TIMEOUT_S):
                raise RuntimeError(f"the process of rank {rank} has not started after {START_TIMEOUT_S:.0f} s")
            self._connections[rank].recv_bytes()
        if fresh:
            self._generation += 1

    def _start(self, rank: int, port: int) -> None:
        own, other = self._spawn.Pipe()
        process = self._spawn.Process(target=_serve, args=(other, port), name=f"rank-{rank}", daemon=True)
        process.start()
        other.close()
        if rank < len(self._processes):
            self._connections[rank].close()
            self._processes[rank], self._connections[rank] = process, own
        else:
            self._processes.append(process)
            self._connections.append(own)

    def _collect(self, num_ranks: int, deadline_s: float) -> tuple[dict[int, Any], dict[int, RankError]]:
        answers: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        waiting = {self._connections[rank]: rank for rank in range(num_ranks)}
        has_failed = False
        while waiting:
            for connection in wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic())):
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                found = self._receive(rank)
                if isinstance(found, RankError):
                    errors[rank] = found
                else:
                    answers[rank] = found[0]
            if errors and not has_failed:
                has_failed, deadline_s = True, min(deadline_s, time.monotonic() + GRACE_S)
            if waiting and time.monotonic() >= deadline_s:
                for rank in waiting.values():
                    self._end(rank)
                    errors[rank] = RankError("", "late", "had not returned in time and was ended\n")
                break
        return answers, errors

    def _receive(self, rank: int) -> tuple[Any] | RankError:
        try:
            found = pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            return RankError("", f"ended with {code}", f"its process ended with exit code {code}\n")
        assert isinstance(found, RankError | tuple), "a rank answers with a result or an error"
        return found

    def _end(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()
        self._connections[rank].close()


class _Contexts:
    """One process's contexts by layout, made when first used; those of another generation are dropped."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._port = port
        self._store: Store | None = None
        self._generation = -1
        self._made: dict[ParallelLayout, ParallelContext] = {}

    def of(self, layout: ParallelLayout, generation: int, timeout_s: float) -> ParallelContext:
        if generation != self._generation:
            self._made.clear()
            self._generation = generation
        if layout not in self._made:
            self._made[layout] = self._make(layout, timeout_s)
        context = self._made[layout]
        context.meter.clear()
        return context

    def _make(self, layout: ParallelLayout, timeout_s: float) -> ParallelContext:
        if layout.num_ranks == 1:
            return one_rank()
        if self._store is None:
            self._store = join_store("127.0.0.1", self._port, 1 + MOST_RANKS, START_TIMEOUT_S)
        return make_context(layout, self._rank, within(self._store, f"{self._generation} {layout}"), timeout_s)


def _serve(connection: Connection, port: int) -> None:
    """A process of the pool: answers one task after the other until the pool has gone."""
    torch.set_num_threads(1)
    rank = int(multiprocessing.current_process().name.removeprefix("rank-"))
    contexts = _Contexts(rank, port)
    connection.send_bytes(b"")
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(contexts, task))


def _answer(contexts: _Contexts, task: bytes) -> bytes:
    try:
        generation, layout, function, args, timeout_s = pickle.loads(task)
        torch.manual_seed(0)
        return pickle.dumps((function(contexts.of(layout, generation, timeout_s), *args),))
    except BaseException as error:  # the boundary of the process: whatever it is, the pool hears of it
        return pickle.dumps(RankError(type(error).__name__, str(error), traceback.format_exc()))
