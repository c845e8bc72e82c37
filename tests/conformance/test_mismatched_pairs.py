"""Workers whose caches mean different bytes: real gateway, real workers, real NIXL. They never pair, the operator sees why, and no
client gets a wrong answer: requests wait for a pair that fits, or end with a clear error.
"""

import asyncio
import logging
import multiprocessing
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

import glm_runtime
from cluster.directory_host import DirectoryHost
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.config import WireConfig
from kv_transfer.identity import WorkerId
from kv_transfer.messages import WorkerEntry, WorkerState
from tests.fakes.fake_workers import SECRET
from tests.fakes.gateway_process import running_gateway, wait_for
from tests.prompts import make_prompt
from tests.reference import Reference

Role = Literal["prefill", "decode"]

BASE: Mapping[str, str] = {"cache_format": "fp8_ds_mla"}
OTHERS: Mapping[str, Mapping[str, str]] = {
    "another format of 580 bytes a token and layer": {"cache_format": "bf16", "index_format": "fp8"},
    "the same bytes, another encoding of index scales": {"cache_format": "fp8_ds_mla", "index_scale": "ue8m0"},
}
WORKER_WAIT_S = 2.0
START_S = 90.0
MAX_TOKENS = 10
WIRE = WireConfig()


def serve_worker(worker_id: str, role: Role, port: int, runtime: RuntimeConfig, log_file: str) -> None:
    """A worker's process."""
    from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork

    logging.basicConfig(filename=log_file, level=logging.INFO)
    identity = WorkerIdentity(
        worker_id=WorkerId(worker_id), host="127.0.0.1", directory_host="127.0.0.1", directory_port=port, secret=SECRET
    )
    network = WorkerNetwork(wire=WIRE)
    if role == "prefill":
        from prefill_worker.config import PrefillConfig
        from prefill_worker.service import PrefillService

        PrefillService(identity, runtime, PrefillConfig(), network).run()
    else:
        from decode_worker.config import DecodeConfig
        from decode_worker.service import DecodeService

        DecodeService(identity, runtime, DecodeConfig(), network).run()


class Workers:
    """A directory on a thread of its own, and workers that are started one by one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._processes: list[Any] = []
        self._directory = self._run(self._make_directory())

    @property
    def directory_port(self) -> int:
        return self._directory.port

    def start(self, worker_id: str, role: Role, choices: Mapping[str, Any]) -> None:
        checkpoint = Path(glm_runtime.__file__).parent / "tiny"
        runtime = RuntimeConfig(checkpoint=checkpoint, cache_bytes=16 << 20, max_step_tokens=256, num_threads=1, **choices)
        spawn = multiprocessing.get_context("spawn")
        arguments = (worker_id, role, self.directory_port, runtime, str(self._folder / f"{worker_id}.log"))
        process = spawn.Process(target=serve_worker, args=arguments, daemon=True)
        process.start()
        self._processes.append(process)

    def log(self, worker_id: str) -> str:
        path = self._folder / f"{worker_id}.log"
        return path.read_text() if path.exists() else ""

    def entry(self, worker_id: str) -> WorkerEntry | None:
        async def look() -> WorkerEntry | None:
            return self._directory.entry(WorkerId(worker_id))

        return self._run(look())

    def is_serving(self, worker_id: str) -> bool:
        entry = self.entry(worker_id)
        return entry is not None and entry.state is WorkerState.SERVING

    def pairs_up(self, worker_id: str) -> set[str]:
        """What `glm-cluster status` shows as pairs_up."""
        entry = self.entry(worker_id)
        return {pair.worker_id for pair in entry.pairs if pair.up} if entry is not None else set()

    def steps(self, worker_id: str) -> int:
        entry = self.entry(worker_id)
        assert entry is not None
        return entry.load.num_steps

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(15)
        self._run(self._directory.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _make_directory(self) -> DirectoryHost:
        directory = DirectoryHost(SECRET, "127.0.0.1", lambda _entry, _heard_at_s: None, WIRE)
        await directory.start()
        return directory

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    running = Workers(tmp_path)
    try:
        yield running
    finally:
        running.close()


def until(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, START_S, what)


def ask(url: str, prompt: list[int]) -> httpx.Response:
    body = {
        "model": "glm", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True
    }  # fmt: skip
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("other", [pytest.param(name, marks=pytest.mark.slow) if "format" in name else name for name in OTHERS])
def test_workers_that_store_other_bytes_never_pair_and_nobody_gets_a_wrong_answer(workers: Workers, tmp_path: Path, other: str) -> None:
    prompt = make_prompt(200, 7)
    workers.start("prefill-0", "prefill", OTHERS[other])
    workers.start("decode-0", "decode", BASE)
    with running_gateway(tmp_path / "gateway", workers.directory_port, router={"worker_wait_s": WORKER_WAIT_S}, wire=WIRE) as gateway:
        until(lambda: "code=layout_mismatch" in workers.log("decode-0"), "the decode worker's log says why the pair is refused")
        until(lambda: workers.is_serving("prefill-0") and workers.is_serving("decode-0"), "both workers serve")
        assert workers.pairs_up("decode-0") == set()
        assert gateway.get("/ready").status_code == 503
        refused = ask(gateway.url, prompt)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "no_capacity"
        assert int(refused.headers["retry-after"]) >= 1

        workers.start("prefill-1", "prefill", BASE)
        until(lambda: workers.pairs_up("decode-0") == {"prefill-1"}, "the worker that fits is paired")
        gateway.wait_until_ready()
        answers = [ask(gateway.url, prompt), ask(gateway.url, make_prompt(90, 8))]
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == Reference(BASE).greedy(
        [prompt, make_prompt(90, 8)], MAX_TOKENS
    )
    assert workers.steps("prefill-0") == 0
    assert workers.log("decode-0").count("code=layout_mismatch") == 1, "it is an operator's matter: said once, not tried again"
