"""One real gateway in front of fake workers, shared by the tests of the HTTP surface."""

from collections.abc import Iterator

import pytest

from router.gateway.tokenizer import TextTokenizer
from tests.fakes.fake_workers import FakeCluster, scripted_model
from tests.fakes.gateway_process import TINY, RunningGateway, running_gateway, wait_for

SCRIPT = "I think so.</think>Hello there, friend. ñandú 🙂 bye<|user|>"
"""What the fake workers say unless a test wants something else."""

QUICK_TIMERS = {
    "worker_wait_s": 0.5, "control_rpc_s": 0.6, "ask_after_s": 0.3, "progress_timeout_s": 1.5, "silence_timeout_s": 1.5, "tick_s": 0.02,
}  # fmt: skip


@pytest.fixture(scope="session")
def gateway_tokenizer() -> TextTokenizer:
    return TextTokenizer(TINY)


@pytest.fixture(scope="session")
def shared_workers(gateway_tokenizer: TextTokenizer) -> Iterator[FakeCluster]:
    cluster = FakeCluster(scripted_model(gateway_tokenizer.encode_raw(SCRIPT)), num_decode=2)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def shared_gateway(shared_workers: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, shared_workers.directory_port, gateway={"keepalive_s": 0.4}, router=QUICK_TIMERS) as running:
        yield running


@pytest.fixture
def workers(shared_workers: FakeCluster, gateway_tokenizer: TextTokenizer) -> Iterator[FakeCluster]:
    """The fake cluster, as new; afterwards nothing may be held on any worker."""
    shared_workers.model = scripted_model(gateway_tokenizer.encode_raw(SCRIPT))
    shared_workers.reset()
    yield shared_workers
    shared_workers.reset()
    wait_for(lambda: shared_workers.num_live() == 0, what="every transfer is closed")


@pytest.fixture
def gateway(shared_gateway: RunningGateway, workers: FakeCluster) -> RunningGateway:
    """A gateway that sees all of the workers, and sees them idle: the next request goes to the first of each role."""

    def sees_all() -> bool:
        status = shared_gateway.get("/status.json").json()
        idle = [worker for worker in status["workers"] if worker["is_linked"] and worker["load"]["num_running"] == 0]
        return len(idle) == len(workers.workers) and bool(status["is_ready"]) and status["requests"]["in_flight"] == 0

    wait_for(sees_all, what="the gateway is connected to all workers")
    return shared_gateway
