"""The life of a worker service: load, serve, drain, stop; and what ends it otherwise. In threads, with the shipped checkpoint."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import glm_runtime
from decode_worker.config import DecodeConfig
from decode_worker.service import DecodeService
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
from glm_runtime.engine.worker_role import Outside
from glm_runtime.engine.worker_shell import ShellTiming, WorkerShell
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import ConfigError, EngineFault
from kv_transfer.identity import WorkerId
from kv_transfer.link import Party
from kv_transfer.messages import FailureKind, SamplingParameters, WorkerState
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from prefill_worker.config import PrefillConfig
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService
from tests.fakes.link_router import LinkRouter

RUNTIME = RuntimeConfig(checkpoint=Path(glm_runtime.__file__).parent / "tiny", cache_bytes=24 << 20, max_step_tokens=64, num_threads=1)
TIMING = ShellTiming(tick_interval_s=0.05, step_timeout_s=0.3, stop_timeout_s=0.5, start_timeout_s=10.0)


class Cell:
    """A router, and services in threads of their own; what each `run` raised is kept."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.router = self.run(self._make_router())
        self.port = self.run(self.router.start())
        self.outcomes: dict[str, BaseException | None] = {}
        self._services: dict[str, tuple[Any, threading.Thread]] = {}

    async def _make_router(self) -> LinkRouter:
        return LinkRouter(self.secret)

    def run(self, coroutine: Any, timeout_s: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def identity(self, name: str) -> WorkerIdentity:
        return WorkerIdentity(
            worker_id=WorkerId(name), host="127.0.0.1", directory_host="127.0.0.1", directory_port=self.port, secret=self.secret
        )

    def start(self, name: str, run: Callable[[], None], service: Any) -> Any:
        def host() -> None:
            try:
                run()
            except BaseException as error:
                self.outcomes[name] = error
            else:
                self.outcomes[name] = None

        thread = threading.Thread(target=host, daemon=True)
        self._services[name] = (service, thread)
        thread.start()
        return service

    def wait_for_state(self, name: str, state: WorkerState, timeout_s: float = 30.0) -> None:
        self.wait(lambda: (entry := self.router.entry(name)) is not None and entry.state is state, timeout_s)

    @staticmethod
    def wait(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, "waited too long"
            time.sleep(0.02)

    def join(self, name: str, timeout_s: float = 20.0) -> BaseException | None:
        self._services[name][1].join(timeout_s)
        assert not self._services[name][1].is_alive(), f"{name} did not stop"
        return self.outcomes[name]

    def close(self) -> None:
        for name, (service, _) in self._services.items():
            service.request_stop()
            self.join(name)
        self.run(self.router.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    yield made
    made.close()


def start_prefill(cell: Cell, runtime: RuntimeConfig = RUNTIME) -> PrefillService:
    service = PrefillService(cell.identity("p0"), runtime, PrefillConfig(tick_interval_s=0.05), WorkerNetwork())
    return cell.start("p0", service.run, service)


def start_decode(cell: Cell) -> DecodeService:
    config = DecodeConfig(max_running=4, max_chunk_tokens=64, tick_interval_s=0.05)
    service = DecodeService(cell.identity("d0"), RUNTIME, config, WorkerNetwork())
    return cell.start("d0", service.run, service)


def test_a_stop_before_and_while_loading_is_obeyed(cell: Cell) -> None:
    early = PrefillService(cell.identity("early"), RUNTIME, PrefillConfig(), WorkerNetwork())
    early.request_stop()
    cell.start("early", early.run, early)
    assert cell.join("early", 2.0) is None
    service = start_prefill(cell)
    cell.wait_for_state("p0", WorkerState.STARTING)
    service.request_stop()
    assert cell.join("p0") is None


def test_a_checkpoint_that_is_not_there_is_one_clear_error(cell: Cell, tmp_path: Path) -> None:
    start_prefill(cell, RuntimeConfig(checkpoint=tmp_path))
    error = cell.join("p0")
    assert isinstance(error, ConfigError)
    assert str(tmp_path) in str(error)


def test_a_drained_worker_ends_its_requests_takes_no_other_and_is_quiet(cell: Cell) -> None:
    start_prefill(cell)
    decode = start_decode(cell)
    cell.run(cell.router.wait_for_pair("p0", "d0"))
    sampling = SamplingParameters(max_tokens=2000, seed=0)  # seconds, since what is running is told once a second
    running = asyncio.run_coroutine_threadsafe(cell.router.ask(list(range(100)), sampling, decode="d0", prefill="p0"), cell._loop)
    cell.wait(lambda: (entry := cell.router.entry("d0")) is not None and entry.load.num_running == 1)
    decode.request_drain(30.0)
    cell.wait_for_state("d0", WorkerState.DRAINING)
    refused = cell.run(cell.router.ask([1, 2, 3], sampling, decode="d0", prefill=None))
    assert refused.failure.kind is FailureKind.RETRYABLE_ELSEWHERE
    assert refused.failure.code == "draining"
    assert len(running.result(30).tokens) == 2000
    cell.wait_for_state("d0", WorkerState.QUIET)
    decode.request_stop()
    assert cell.join("d0") is None


def test_a_stopping_worker_says_so_to_those_it_leaves(cell: Cell) -> None:
    start_prefill(cell)
    decode = start_decode(cell)
    cell.run(cell.router.wait_for_pair("p0", "d0"))
    running = asyncio.run_coroutine_threadsafe(
        cell.router.ask(list(range(50)), SamplingParameters(max_tokens=2000, seed=0), decode="d0", prefill=None, is_left=True), cell._loop
    )
    cell.wait(lambda: (entry := cell.router.entry("d0")) is not None and entry.load.num_running == 1)
    decode.request_stop()
    answer = running.result(20)
    assert answer.failure.kind is FailureKind.RETRYABLE_ELSEWHERE
    assert cell.join("d0") is None


class SpoiltRole(PrefillRole):
    """A prefill worker whose first step fails, or never returns."""

    gate: threading.Event | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.gate is not None:
            self.gate.wait(20)
        raise ValueError("the device fell off the bus")


def start_spoilt(cell: Cell, gate: threading.Event | None) -> WorkerShell:
    network = WorkerNetwork()

    def make_role(model: LoadedModel, outside: Outside, me: Party) -> SpoiltRole:
        transport = LoopbackTransport(LoopbackFabric(), me.peer_id, model.memory)
        role = SpoiltRole(model, outside, me, PrefillConfig(), network, transport)
        role.gate = gate
        return role

    shell = WorkerShell(cell.identity("p0"), "prefill", RUNTIME, network, TIMING, make_role)
    return cell.start("p0", lambda: shell.run(None), shell)


def send_one_request(cell: Cell) -> None:
    cell.run(cell.router.start_only([1, 2, 3], SamplingParameters(max_tokens=4, seed=0), prefill="p0"))


def test_a_failed_step_ends_the_service(cell: Cell) -> None:
    start_spoilt(cell, None)
    send_one_request(cell)
    error = cell.join("p0")
    assert isinstance(error, EngineFault)
    assert "the device fell off the bus" in str(error)


def test_a_hung_step_ends_the_service_though_it_never_returns(cell: Cell) -> None:
    gate = threading.Event()
    start_spoilt(cell, gate)
    send_one_request(cell)
    error = cell.join("p0")
    assert isinstance(error, EngineFault)
    assert "hangs" in str(error)
    gate.set()


def test_a_rank_that_is_lost_while_the_model_loads_ends_the_service_with_the_reason(cell: Cell) -> None:
    shell = start_spoilt(cell, None)
    while "p0" not in cell.outcomes:  # as the watch over the ranks tells it, from its own thread; loading takes longer than this
        shell._rank_lost(EngineFault("rank 1 of p0 is gone"))
        time.sleep(0.01)
    assert "rank 1 of p0 is gone" in str(cell.join("p0"))
