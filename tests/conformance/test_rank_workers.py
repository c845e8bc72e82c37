"""Workers of several ranks that are cut differently: a process for each rank, a real gateway, real NIXL. The answers are one rank's.

What a decode rank does not read itself it copies from another, and a prefill rank serves only its share: a byte that is not where the
geometry says changes the text.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

import glm_runtime
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.config import TransportConfig, WireConfig
from kv_transfer.identity import WorkerId
from kv_transfer.messages import SamplingParameters
from tests.conformance.test_mismatched_pairs import WIRE, Workers
from tests.fakes.fake_workers import SECRET
from tests.fakes.gateway_process import running_gateway, wait_for
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt
from tests.rank_answers import assert_answers, config_of, one_rank_answers

Role = Literal["prefill", "decode"]

START_S = 180.0
MAX_TOKENS = 12
CHOICES: dict[str, Any] = {"cache_format": "bf16", "numerics": "deterministic"}
LAYOUTS = {
    "pcp2 to one rank": (ParallelLayout(pcp_size=2), ParallelLayout()),
    "one rank to tp2": (ParallelLayout(), ParallelLayout(tp_size=2)),
    "pcp2 to tp2": (ParallelLayout(pcp_size=2), ParallelLayout(tp_size=2)),
    "pcp2 to dcp2": (ParallelLayout(pcp_size=2), ParallelLayout(tp_size=2, dcp_size=2)),
    "tp2 to dcp4": (ParallelLayout(tp_size=2), ParallelLayout(tp_size=4, dcp_size=4)),
    "pcp4 to tp4 dcp2": (ParallelLayout(pcp_size=4), ParallelLayout(tp_size=4, dcp_size=2)),
}


def serve_rank_process(
    worker_id: str, role: Role, rank: int, port: int, runtime: RuntimeConfig, log_file: str, address: "SimpleQueue[tuple[str, int]]"
) -> None:
    """The process of one rank. address: rank 0 puts where the others are to join, as often as there are others."""
    from glm_runtime.engine.rank_follower import FollowerService
    from glm_runtime.engine.rank_group import RankGroupConfig
    from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
    from kv_transfer.transports.nixl import NixlTransport

    logging.basicConfig(filename=log_file, level=logging.INFO)
    identity = WorkerIdentity(
        worker_id=WorkerId(worker_id), host="127.0.0.1", directory_host="127.0.0.1", directory_port=port, secret=SECRET
    )
    network = WorkerNetwork(wire=WireConfig())
    if rank:
        group = RankGroupConfig(layout=runtime.parallel, step_timeout_s=60.0, start_timeout_s=START_S)
        follower = FollowerService(
            identity,
            role,
            rank,
            runtime,
            group,
            network.wire,
            lambda me, memory: NixlTransport(me, memory, TransportConfig()),
            network.transport.poll_interval_s,
        )
        follower.join(*address.get())
        follower.run()
        return
    if role == "prefill":
        from prefill_worker.config import PrefillConfig
        from prefill_worker.service import PrefillService

        prefill = PrefillService(identity, runtime, PrefillConfig(), network, start_timeout_s=START_S)
        _tell(address, prefill.group_address, runtime.parallel)
        prefill.run()
    else:
        from decode_worker.config import DecodeConfig
        from decode_worker.service import DecodeService

        decode = DecodeService(identity, runtime, DecodeConfig(), network, start_timeout_s=START_S)
        _tell(address, decode.group_address, runtime.parallel)
        decode.run()


def _tell(address: "SimpleQueue[tuple[str, int]]", own: tuple[str, int] | None, layout: ParallelLayout) -> None:
    for _ in range(1, layout.num_ranks):
        assert own is not None
        address.put(own)


class RankWorkers(Workers):
    """As `Workers`, with a process for each rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._addresses: list[Any] = []

    def start_ranks(self, worker_id: str, role: Role, layout: ParallelLayout) -> None:
        checkpoint = Path(glm_runtime.__file__).parent / "tiny"
        runtime = RuntimeConfig(checkpoint=checkpoint, cache_bytes=16 << 20, max_step_tokens=256, num_threads=1, parallel=layout, **CHOICES)
        spawn = multiprocessing.get_context("spawn")
        address = spawn.SimpleQueue()
        self._addresses.append(address)  # its semaphores must live until the processes have found them
        for rank in range(layout.num_ranks):
            log = str(self._folder / f"{worker_id}.{rank}.log")
            arguments = (worker_id, role, rank, self.directory_port, runtime, log, address)
            process = spawn.Process(target=serve_rank_process, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def is_at_rest(self) -> bool:
        """Whether decode says that it moves and holds nothing."""
        entry = self.entry("decode-0")
        return entry is not None and entry.load.num_transfers == entry.load.blocks_held == 0

    def logs(self) -> str:
        """The ends of all ranks' logs, for a failed test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.log")))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[RankWorkers]:
    running = RankWorkers(tmp_path)
    try:
        yield running
    finally:
        running.close()


async def ask_all(url: str, prompts: list[list[int]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": "glm", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return await asyncio.gather(*[client.post(f"{url}/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name not in ("pcp2 to tp2", "pcp2 to dcp2") else name for name in LAYOUTS]
)
def test_workers_whose_ranks_are_cut_differently_answer_as_one_rank(workers: RankWorkers, tmp_path: Path, name: str) -> None:
    source, sink = LAYOUTS[name]
    workers.start_ranks("prefill-0", "prefill", source)
    workers.start_ranks("decode-0", "decode", sink)
    prompts = [make_prompt(length, number) for number, length in enumerate((330, 70, 5, 200))]
    longer = [*prompts[0], *make_prompt(90, 9)]
    with running_gateway(tmp_path / "gateway", workers.directory_port, router={"worker_wait_s": 60.0}, wire=WIRE) as gateway:
        try:
            wait_for(lambda: workers.pairs_up("decode-0") == {"prefill-0"}, START_S, "the workers are paired")
        except AssertionError as error:
            raise AssertionError(workers.logs()) from error
        gateway.wait_until_ready()
        answers = asyncio.run(ask_all(gateway.url, prompts))
        answers += asyncio.run(ask_all(gateway.url, [longer]))
    assert [answer.status_code for answer in answers] == [200] * 5, workers.logs()
    told = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    greedy = SamplingParameters(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)
    assert_answers(told, *one_rank_answers(config_of(TINY, **CHOICES), [*prompts, longer], greedy))
    wait_for(workers.is_at_rest, 10.0, "decode's report that nothing is held")  # a row is up to a second old
    entry = workers.entry("decode-0")
    assert entry is not None
    assert entry.load.bytes_read > 0
