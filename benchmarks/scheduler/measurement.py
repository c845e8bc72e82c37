"""Times the control loop's part of a step: `decide` and `publish`, and nothing that the network or the model does."""

import asyncio
import time

from benchmarks.scheduler.bench_roles import MAX_DRAFTS, Outcomes, make_decode_role, make_prefill_role
from glm_runtime.engine.worker_role import WorkerRole

WARM_UP_STEPS = 20


def decode_steps(num_requests: int, *, has_drafts: bool, num_steps: int) -> list[float]:
    """Seconds of each of `num_steps` decode steps."""

    async def run() -> list[float]:
        role = make_decode_role(num_requests, MAX_DRAFTS if has_drafts else 0)
        outcomes = Outcomes(1)
        _timed(role, outcomes, WARM_UP_STEPS)
        seconds = _timed(role, outcomes, num_steps)
        load = role.load()
        assert load.num_running == num_requests, "the requests must not end while they are measured"
        await role.close()
        return seconds

    return asyncio.run(run())


def prefill_steps(num_requests: int, *, num_steps: int) -> list[float]:
    """Seconds of each of the first `num_steps` steps after that which admits all prompts."""

    async def run() -> list[float]:
        role = make_prefill_role(num_requests)
        outcomes = Outcomes(1)
        _timed(role, outcomes, 1)
        seconds = _timed(role, outcomes, num_steps)
        await role.close()
        return seconds

    return asyncio.run(run())


def _timed(role: WorkerRole, outcomes: Outcomes, num_steps: int) -> list[float]:
    """Steps back to back in virtual time, where each lasts 23 ms. Clocked is CPU time: what else the machine does is not ours."""
    seconds = []
    now_s = 1.0
    for _ in range(num_steps):
        started_s = time.thread_time()
        role.take_commands(now_s)
        plan = role.decide(now_s)
        decided_s = time.thread_time()
        assert plan is not None, "there is always a step to run"
        result = outcomes.of(plan)
        now_s += 0.023
        landed_s = time.thread_time()
        role.publish(plan, result, now_s)
        seconds.append(time.thread_time() - landed_s + decided_s - started_s)
    return seconds
