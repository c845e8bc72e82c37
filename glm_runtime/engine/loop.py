"""The loop of both workers: take commands, decide, run, publish.

Knows: the order of the four verbs, that only `run` leaves the control loop's thread, and that an idle loop sleeps. A worker whose
replica has others (`StepGate`) makes every step that they make, without rows where it has none, and no step without them.
Does not know: what a plan is. All state belongs to the control loop's thread; while a step runs, that thread is free to
serve connections and timers, so a worker must expect its state to change between `decide` and `publish`.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kv_transfer.errors import EngineFault

PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")
GivenPlan = TypeVar("GivenPlan", covariant=True)
GivenResult = TypeVar("GivenResult", contravariant=True)


class StepWorker(Protocol[PlanT, ResultT]):
    """What the loop drives. Every verb but `run` is called on the control loop's thread and must not block."""

    def take_commands(self, now_s: float) -> None:
        """Apply what came in since the last step: new requests, cancelled ones, passed deadlines."""

    def decide(self, now_s: float) -> PlanT | None:
        """The next step, or None when there is nothing to run until `EngineLoop.wake`."""

    def run(self, plan: PlanT) -> ResultT:
        """Run one step. Blocks; called on the engine thread, so it touches no state but the model's and the pool's bytes."""

    def publish(self, plan: PlanT, result: ResultT, now_s: float) -> None:
        """Apply the step's result and tell whoever waits for it."""


class StepGate(Protocol[GivenPlan, GivenResult]):
    """What keeps a worker in step with the others of its replica; `EngineLoop.wake` when it opens. Called on the control loop's thread."""

    @property
    def empty_plan(self) -> GivenPlan:
        """What is run where this worker has nothing to compute."""

    def may_step(self, *, has_plan: bool) -> bool:
        """Whether the next step is to be made now, with a plan or without. If not, and there is a plan, all are being called."""

    def take(self, result: GivenResult) -> None:
        """A step has returned."""


class EngineThread:
    """One daemon thread that runs blocking calls in order. Unlike an executor's, a hung call does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[PlanT], ResultT], argument: PlanT) -> "asyncio.Future[ResultT]":
        """Start `function(argument)` on the thread; await the future on the calling event loop. Cancelling it does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()
        self._calls.put(lambda: _call_into(loop, future, function, argument))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Let the call that runs now end; says whether the thread ended within `timeout_s`. Blocks."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _call_into(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[ResultT]", function: Callable[[PlanT], ResultT], argument: PlanT
) -> None:
    """Run the call and post its outcome to the event loop, which may be closed by now if the worker gave up waiting."""
    outcome: Callable[[], None]
    try:
        result = function(argument)
    except BaseException as error:
        outcome = _setter(future, error)
    else:
        outcome = _result_setter(future, result)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(outcome)


def _setter(future: "asyncio.Future[ResultT]", error: BaseException) -> Callable[[], None]:
    return lambda: None if future.done() else future.set_exception(error)


def _result_setter(future: "asyncio.Future[ResultT]", result: ResultT) -> Callable[[], None]:
    return lambda: None if future.done() else future.set_result(result)


class EngineLoop(Generic[PlanT, ResultT]):
    """Runs a worker's steps back to back until `stop`, sleeping while it has none.

    gate: of a worker whose replica has others. A plan may have to wait for it; no other is decided on meanwhile.
    """

    def __init__(self, worker: StepWorker[PlanT, ResultT], thread: EngineThread, gate: StepGate[PlanT, ResultT] | None = None) -> None:
        self._worker = worker
        self._thread = thread
        self._gate = gate
        self._work_came = asyncio.Event()
        self._stopping = False
        self._step_started_s: float | None = None

    def wake(self) -> None:
        """Something changed that may give the worker a step: a request, a record, a freed block."""
        self._work_came.set()

    def stop(self) -> None:
        """Let the step that runs now end, then return from `run`."""
        self._stopping = True
        self._work_came.set()

    def step_age_s(self, now_s: float) -> float:
        """How long the present step has been running; 0 between steps. A hung engine shows here and nowhere else."""
        return 0.0 if self._step_started_s is None else now_s - self._step_started_s

    async def run(self) -> None:
        """Turn the loop. Raises EngineFault when a step does: what the model or the pool holds then is not known."""
        plan: PlanT | None = None
        while not self._stopping:
            self._work_came.clear()
            if plan is None:
                now_s = time.monotonic()
                self._worker.take_commands(now_s)
                plan = self._worker.decide(now_s)
            if self._gate is not None and self._gate.may_step(has_plan=plan is not None):
                self._gate.take(await self._step(self._gate.empty_plan if plan is None else plan, is_own=plan is not None))
            elif self._gate is None and plan is not None:
                await self._step(plan, is_own=True)
            else:
                await self._work_came.wait()
                continue
            plan = None

    async def _step(self, plan: PlanT, *, is_own: bool) -> ResultT:
        """Run a plan; of one that is not the worker's own there is nothing to publish."""
        result = await self._run_step(plan)
        if is_own:
            self._worker.publish(plan, result, time.monotonic())
        return result

    async def _run_step(self, plan: PlanT) -> ResultT:
        self._step_started_s = time.monotonic()
        try:
            return await self._thread.submit(self._worker.run, plan)
        except Exception as error:
            raise EngineFault(f"a step failed with {type(error).__name__}: {error}; the worker stops and must be replaced") from error
        finally:
            self._step_started_s = None
