"""A prefill and a decode worker as processes, and the product's own router before them: a cluster without HTTP and without Ray."""

import asyncio
import multiprocessing
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from cluster.directory_host import DirectoryHost
from decode_worker.config import DecodeConfig
from decode_worker.service import DecodeService
from glm_runtime.engine.worker_config import WorkerIdentity, WorkerNetwork
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.config import WireConfig
from kv_transfer.identity import RequestId, WorkerId, pack_tokens
from kv_transfer.messages import FinishReason, SamplingParameters, WorkerLoad
from prefill_worker.config import PrefillConfig
from prefill_worker.service import PrefillService
from router.config import RouterConfig
from router.generation_request import GenerationRequest
from router.output import Wakeup
from router.relay import RelayHooks
from router.service import DirectoryAddress, RouterService

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

HOST = "127.0.0.1"
PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
STOP_TIMEOUT_S = 10.0
REPORTS_S = 2.5
"""After so long a worker has reported what it has counted; it does each second."""

_HOOKS = RelayHooks(on_placed=lambda _: None, on_tokens=lambda _time, _number: None, on_ended=lambda _: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedAnswer:
    """One answer. first_s: from asking to its first token; rest_s: from there to its last."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    first_s: float
    rest_s: float


class ServedPair:
    """Use it as an asynchronous context, on one event loop."""

    def __init__(self, name: str, runtime: RuntimeConfig) -> None:
        self._name = name
        self._secret = secrets.token_bytes(32)
        self._directory = DirectoryHost(self._secret, HOST, lambda _entry, _now_s: None, WireConfig())
        self._runtime = runtime
        self._processes: list[BaseProcess] = []
        self._num_asked = 0

    async def __aenter__(self) -> "ServedPair":
        await self._directory.start()
        address = DirectoryAddress(host=HOST, port=self._directory.port, secret=self._secret)
        config = RouterConfig(keys_look_ahead=self._runtime.max_drafts > 0)
        self._router = RouterService(config, address, _HOOKS, wire=WireConfig(), num_recent=1)
        await self._router.start()
        spawn = multiprocessing.get_context("spawn")
        for target in (_serve_prefill, _serve_decode):
            process = spawn.Process(target=target, args=(self._directory.port, self._secret, self._runtime), daemon=True)
            process.start()
            self._processes.append(process)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._router.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
        await self._directory.close()

    async def ask(self, prompt: Sequence[int], sampling: SamplingParameters, salt: bytes) -> TimedAnswer:
        """One request; the first waits until both workers serve. `salt` keeps it from finding what others have cached."""
        self._num_asked += 1
        request = GenerationRequest(
            request_id=RequestId(f"{self._name}-{self._num_asked}"),
            prompt=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            cache_salt=salt,
        )
        wakeup = Wakeup()
        asked_s = time.perf_counter()
        output = self._router.relay.submit(request, wakeup)
        tokens: list[int] = []
        first_s = 0.0
        while output.finish is None and output.error is None:
            await wakeup.wait()
            tokens += output.take()
            first_s = first_s or (time.perf_counter() - asked_s if tokens else 0.0)
        ended_s = time.perf_counter() - asked_s
        if output.error is not None:
            raise output.error
        return TimedAnswer(tokens=tuple(tokens), finish=output.finish, first_s=first_s, rest_s=ended_s - first_s)

    async def load(self) -> WorkerLoad:
        """What the decode worker says of itself now."""
        await asyncio.sleep(REPORTS_S)
        entry = self._directory.entry(DECODE)
        assert entry is not None, "the worker has served and is in the table"
        return entry.load


def _identity(worker_id: WorkerId, port: int, secret: bytes) -> WorkerIdentity:
    return WorkerIdentity(worker_id=worker_id, host=HOST, directory_host=HOST, directory_port=port, secret=secret)


def _serve_prefill(port: int, secret: bytes, runtime: RuntimeConfig) -> None:
    PrefillService(_identity(PREFILL, port, secret), runtime, PrefillConfig(), WorkerNetwork()).run()


def _serve_decode(port: int, secret: bytes, runtime: RuntimeConfig) -> None:
    DecodeService(_identity(DECODE, port, secret), runtime, DecodeConfig(), WorkerNetwork()).run()
