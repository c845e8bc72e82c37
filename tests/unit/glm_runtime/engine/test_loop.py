"""The four-verb loop: order of the verbs, sleep, faults, and a control loop that stays free while a step runs."""

import asyncio
import threading

import pytest

from glm_runtime.engine.loop import EngineLoop, EngineThread
from kv_transfer.errors import EngineFault


class CountingWorker:
    """Runs `work` steps, each noted with the verb and the thread."""

    def __init__(self, work: int) -> None:
        self.work = work
        self.seen: list[str] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def take_commands(self, now_s: float) -> None:
        self.seen.append("take")

    def decide(self, now_s: float) -> int | None:
        self.seen.append("decide")
        if self.work == 0:
            return None
        self.work -= 1
        return self.work

    def run(self, plan: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return plan * 2

    def publish(self, plan: int, result: int, now_s: float) -> None:
        assert result == plan * 2
        self.seen.append("publish")


def run_with(worker: CountingWorker, script: object) -> None:
    async def main() -> None:
        thread = EngineThread("engine-under-test")
        loop = EngineLoop(worker, thread)
        try:
            await script(loop)  # type: ignore[operator]
        finally:
            worker.gate.set()
            assert thread.stop(5.0)

    asyncio.run(main())


async def until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - the worker under test sets no event
            await asyncio.sleep(0.001)


def test_verbs_come_in_order_and_run_is_on_the_engine_thread() -> None:
    worker = CountingWorker(2)

    async def script(loop: EngineLoop[int, int]) -> None:
        running = asyncio.create_task(loop.run())
        await until(lambda: worker.seen.count("publish") == 2 and worker.seen[-1] == "decide")
        loop.stop()
        await running

    run_with(worker, script)
    assert worker.seen[:8] == ["take", "decide", "publish", "take", "decide", "publish", "take", "decide"]
    assert worker.threads == {"engine-under-test"}


def test_an_idle_loop_sleeps_until_it_is_woken() -> None:
    worker = CountingWorker(0)

    async def script(loop: EngineLoop[int, int]) -> None:
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(0.05)
        assert worker.seen == ["take", "decide"]
        worker.work = 1
        loop.wake()
        await until(lambda: "publish" in worker.seen)
        loop.stop()
        await running

    run_with(worker, script)


def test_the_control_loop_is_free_while_a_step_runs() -> None:
    worker = CountingWorker(1)
    worker.gate.clear()

    async def script(loop: EngineLoop[int, int]) -> None:
        running = asyncio.create_task(loop.run())
        await until(lambda: worker.threads)
        for _ in range(20):
            await asyncio.sleep(0)  # the step blocks its own thread only
        assert "publish" not in worker.seen
        assert loop.step_age_s(float("inf")) == float("inf")
        worker.gate.set()
        await until(lambda: "publish" in worker.seen)
        assert loop.step_age_s(float("inf")) == 0.0
        loop.stop()
        await running

    run_with(worker, script)


def test_a_failing_step_is_an_engine_fault() -> None:
    worker = CountingWorker(1)
    worker.error = ValueError("a kernel says no")

    async def script(loop: EngineLoop[int, int]) -> None:
        with pytest.raises(EngineFault, match="ValueError: a kernel says no"):
            await loop.run()

    run_with(worker, script)
    assert "publish" not in worker.seen


def test_stop_lets_the_running_step_end() -> None:
    worker = CountingWorker(5)
    worker.gate.clear()

    async def script(loop: EngineLoop[int, int]) -> None:
        running = asyncio.create_task(loop.run())
        await until(lambda: worker.threads)
        loop.stop()
        worker.gate.set()
        await running

    run_with(worker, script)
    assert worker.seen == ["take", "decide", "publish"]


class HandGate:
    """Opens and closes by hand; a closed one notes who asks. Closes after a step without rows."""

    empty_plan = -1

    def __init__(self) -> None:
        self.is_open = False
        self.asked: list[bool] = []
        self.taken: list[int] = []

    def may_step(self, *, has_plan: bool) -> bool:
        if not self.is_open:
            self.asked.append(has_plan)
        return self.is_open

    def take(self, result: int) -> None:
        self.taken.append(result)
        self.is_open = result != -2


def test_a_plan_waits_for_the_gate_and_then_runs_as_it_was() -> None:
    worker, gate = CountingWorker(2), HandGate()

    async def main() -> None:
        thread = EngineThread("gated")
        loop = EngineLoop(worker, thread, gate)
        running = asyncio.create_task(loop.run())
        await until(lambda: gate.asked)
        loop.wake()  # for whatever: no other plan is decided on
        await until(lambda: len(gate.asked) == 2)
        assert worker.seen == ["take", "decide"]
        gate.is_open = True
        loop.wake()
        await until(lambda: gate.asked[-1] is False)
        loop.stop()
        await running
        assert thread.stop(5.0)

    asyncio.run(main())
    assert gate.taken == [2, 0, -2], "two plans, and a step without rows that closes the gate"
    assert worker.seen.count("publish") == 2
    assert gate.asked == [True, True, False]


def test_a_worker_without_plans_is_called_to_steps_and_publishes_nothing() -> None:
    worker, gate = CountingWorker(0), HandGate()

    async def main() -> None:
        thread = EngineThread("gated")
        loop = EngineLoop(worker, thread, gate)
        running = asyncio.create_task(loop.run())
        await until(lambda: gate.asked)
        gate.is_open = True
        loop.wake()
        await until(lambda: gate.taken)
        loop.stop()
        await running
        assert thread.stop(5.0)

    asyncio.run(main())
    assert gate.taken == [-2]
    assert "publish" not in worker.seen


def test_a_stopped_loop_leaves_a_plan_that_waits_for_the_gate() -> None:
    worker, gate = CountingWorker(1), HandGate()

    async def main() -> None:
        thread = EngineThread("gated")
        loop = EngineLoop(worker, thread, gate)
        running = asyncio.create_task(loop.run())
        await until(lambda: gate.asked)
        loop.stop()
        await running
        assert thread.stop(5.0)

    asyncio.run(main())
    assert not worker.threads, "no step was run"


def test_a_hung_call_does_not_keep_the_thread_from_being_given_up() -> None:
    gate = threading.Event()

    async def main() -> None:
        thread = EngineThread("hung")
        hung = thread.submit(lambda _: gate.wait(10), None)
        assert not await asyncio.to_thread(thread.stop, 0.05)
        gate.set()
        assert await hung

    asyncio.run(main())
