"""Workers, a gate and the messages between them in any order: no wake-up is lost, nobody waits for ever, and all count the same waves.

The world is that of `EngineLoop` and `ModelRunner` without time: a worker decides, asks or begins a step; a step returns when all have
begun it, with what they agreed on; its result reaches each worker some time later. Messages keep their order on a connection only.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime.engine.waves import Gate, Member, WaveState, ask, end_wave, hear_go, hear_want

SETTINGS = settings(max_examples=300, derandomize=True, deadline=None)


@dataclass
class Worker:
    """work: steps' worth of it. begun: whether it has rows in the step that it waits in. result: of one that has returned unheard."""

    member: Member = field(default_factory=Member)
    work: int = 0
    begun: bool | None = None
    result: bool | None = None
    wants: deque[int] = field(default_factory=deque)
    calls: deque[int] = field(default_factory=deque)


class World:
    def __init__(self, num_workers: int) -> None:
        self.workers = [Worker() for _ in range(num_workers)]
        self.gate = Gate()
        self.rows_in_wave: dict[int, int] = {}

    def moves(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What can happen now, but for work that arrives."""
        for number, worker in enumerate(self.workers):
            if worker.wants:
                yield f"the gate hears {number}", lambda worker=worker: self.hear_want(worker)  # type: ignore[misc]
            if worker.calls:
                yield f"{number} hears the gate", lambda worker=worker: self.hear_go(worker)  # type: ignore[misc]
            if worker.result is not None:
                yield f"{number} ends a step", lambda worker=worker: self.end_step(worker)  # type: ignore[misc]
            elif worker.begun is None and self.can_turn(worker):
                yield f"{number} turns its loop", lambda worker=worker: self.turn(worker)  # type: ignore[misc]

    def can_turn(self, worker: Worker) -> bool:
        """A loop that has nothing to do sleeps."""
        return worker.member.is_stepping or (worker.work > 0 and worker.member.state is WaveState.ASLEEP)

    def turn(self, worker: Worker) -> None:
        if not worker.member.is_stepping:
            worker.member = ask(worker.member)
            worker.wants.append(worker.member.wave)
            return
        worker.begun = worker.work > 0
        if all(each.begun is not None and each.result is None for each in self.workers):
            self.run_step()

    def run_step(self) -> None:
        (wave,) = {each.member.wave for each in self.workers}  # all are in the same one
        num_rows = sum(bool(each.begun) for each in self.workers)
        assert num_rows or self.rows_in_wave.get(wave), "a wave that nobody needs was begun"
        self.rows_in_wave[wave] = self.rows_in_wave.get(wave, 0) + num_rows
        for each in self.workers:
            each.work -= bool(each.begun)
            each.result = num_rows > 0

    def end_step(self, worker: Worker) -> None:
        if not worker.result:
            worker.member = end_wave(worker.member)
        worker.begun = worker.result = None

    def hear_want(self, worker: Worker) -> None:
        self.gate, wave = hear_want(self.gate, worker.wants.popleft())
        for each in self.workers if wave is not None else ():
            each.calls.append(wave)

    def hear_go(self, worker: Worker) -> None:
        worker.member = hear_go(worker.member, worker.calls.popleft())


def settle(world: World, choose: Callable[[int], int]) -> None:
    """Let everything happen that can, in an order of `choose`; it ends, for a wave ends."""
    for _ in range(10_000):
        moves = list(world.moves())
        if not moves:
            return
        moves[choose(len(moves))][1]()
    raise AssertionError("the workers do not come to rest")


@SETTINGS
@given(num_workers=st.integers(2, 4), seed=st.integers(0, 2**32), num_moves=st.integers(0, 120))
def test_all_work_is_done_and_all_sleep_after_equally_many_waves(num_workers: int, seed: int, num_moves: int) -> None:
    choose = random.Random(seed).randrange
    world = World(num_workers)
    for _ in range(num_moves):
        moves = list(world.moves())
        if not moves or choose(8) == 0:
            world.workers[choose(num_workers)].work += 1 + choose(2)
        else:
            moves[choose(len(moves))][1]()
    settle(world, choose)
    assert [worker.work for worker in world.workers] == [0] * num_workers
    assert {worker.member for worker in world.workers} == {Member(WaveState.ASLEEP, world.gate.next_wave)}
    assert all(worker.begun is None for worker in world.workers)
    assert sorted(world.rows_in_wave) == list(range(world.gate.next_wave))
