"""Workers of one replica in processes of their own, with the real gate, loop and agreement: they sleep, are woken and step together."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from glm_runtime.engine.loop import EngineLoop, EngineThread
from glm_runtime.engine.step_gate import GateHost, GateMember, OnFault
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.lock_step import LockStep
from kv_transfer.config import WireConfig
from kv_transfer.identity import SequenceId, WorkerId, new_incarnation
from kv_transfer.link import Party
from kv_transfer.messages import PartyKind
from tests.rank_pool import RankPool

SECRET = b"a cluster's secret"
NUM_PIECES = 60
"""Steps' worth of work that comes to each worker, now and then."""
TIMEOUT_S = 60.0


class Seen(NamedTuple):
    """steps: in how many the worker was; own: in how many it had rows; idle: in how many nobody had; waves: as it counted."""

    steps: int
    own: int
    idle: int
    waves: int
    decisions: int
    faults: list[str]


@dataclass
class PieceWorker:
    """A `StepWorker` whose steps are an agreement and a sum over all workers, which would wait for ever for one that is elsewhere."""

    context: ParallelContext
    waiting: int = 0
    left: int = NUM_PIECES
    steps: int = 0
    own: int = 0
    idle: int = 0
    decisions: int = 0
    is_over: bool = False
    plan: StepPlan = field(
        default_factory=lambda: StepPlan(
            step_number=1, slices=(SequenceSlice(sequence_id=SequenceId("a"), tokens=[1], start=0, block_table=[]),)
        )
    )

    def take_commands(self, now_s: float) -> None:
        pass

    def decide(self, now_s: float) -> StepPlan | None:
        self.decisions += 1
        return self.plan if self.waiting else None

    def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        lock_step, has_rows = LockStep(self.context.data), bool(plan.slices)
        is_needed, is_more = lock_step.anyone(has_rows, self.left - has_rows > 0)
        if is_needed:
            rows = self.context.world.all_reduce(torch.tensor([float(has_rows)]))
            assert rows >= 1.0
        else:
            self.idle += 1
        self.is_over = not is_needed and not is_more
        return StepResult(step_number=plan.step_number, samples={}, is_idle=not is_needed)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        assert plan is self.plan
        assert not result.is_idle
        self.own += 1
        self.waiting -= 1
        self.left -= 1


class EndingGate(GateMember):
    """Ends the loop after the step in which all agree that no work is left."""

    def __init__(self, worker: PieceWorker, on_fault: OnFault) -> None:
        super().__init__(lambda: self.loop.wake(), on_fault)
        self.loop: EngineLoop[StepPlan, StepResult]
        self._worker = worker

    def take(self, result: StepResult) -> None:
        super().take(result)
        if self._worker.is_over:
            self.loop.stop()


def lead(context: ParallelContext, seed: int) -> Seen:
    """One worker, until all have done all of their work."""
    return asyncio.run(_lead(context, random.Random(f"{seed} {context.rank}")))


async def _lead(context: ParallelContext, rng: random.Random) -> Seen:
    faults: list[str] = []
    names = [WorkerId(f"decode-{worker}") for worker in range(context.data.size)]
    me = Party(PartyKind.DECODE, names[context.data.rank], new_incarnation())
    wire = WireConfig(dial_timeout_s=20.0, silence_timeout_s=20.0)
    host = GateHost(SECRET, me, "127.0.0.1", names, wire, lambda error: faults.append(str(error))) if context.rank == 0 else None
    port = int(context.world.broadcast_bytes(str(await host.start()).encode() if host is not None else b""))
    worker, thread = PieceWorker(context), EngineThread("pieces")
    gate = EndingGate(worker, lambda error: faults.append(str(error)))
    gate.loop = loop = EngineLoop(worker, thread, gate)
    await gate.join(SECRET, me, "127.0.0.1", port, wire)
    async with asyncio.timeout(TIMEOUT_S):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(loop.run())
            tasks.create_task(_bring_work(worker, loop, rng))
    waves = gate.member.wave
    await asyncio.to_thread(context.world.barrier)  # nobody leaves before all have ended
    gate.close()
    if host is not None:
        await host.close()
    assert thread.stop(5.0)
    return Seen(worker.steps, worker.own, worker.idle, waves, worker.decisions, faults)


async def _bring_work(worker: PieceWorker, loop: EngineLoop[StepPlan, StepResult], rng: random.Random) -> None:
    """Often at once, sometimes after a while in which all may have gone to sleep."""
    left = NUM_PIECES
    while left:
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.1, 0.2)))
        count = min(left, rng.randint(1, 4))
        worker.waiting += count
        left -= count
        loop.wake()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_sleep_and_step_together(rank_pool: RankPool, num_workers: int) -> None:
    found = rank_pool.run(ParallelLayout(dp_size=num_workers, is_expert_parallel=True), lead, num_workers)
    assert [seen.faults for seen in found] == [[]] * num_workers
    assert [seen.own for seen in found] == [NUM_PIECES] * num_workers, "no work is lost"
    ((steps, idle, waves),) = {(seen.steps, seen.idle, seen.waves) for seen in found}
    assert waves == idle > 3, "each wave ends in one step without rows; they have slept in between"
    assert NUM_PIECES + waves <= steps <= num_workers * NUM_PIECES + waves, "in every other step somebody has rows"
    # A loop turns for each step, each time that work comes, and once for each call: it does not look whether there is something to do.
    assert all(seen.decisions <= steps + NUM_PIECES + waves + 1 for seen in found)
