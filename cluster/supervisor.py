"""The `serve` process: starts everything, keeps it running, ends it in order.

    starts   directory -> gateway process | Ray -> placement groups -> workers (all at once)
    ends     gateway (admits nothing, finishes what runs) -> workers -> Ray -> what is left

Knows: the order and the bounds of both. Does not decide about workers (`reconcile.py`) and touches no request, block or token.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from cluster import process_tree, ray_session, run_state
from cluster.config import ServeConfig
from cluster.directory_host import DirectoryHost
from cluster.fleet import StartFailed, WorkerFleet
from cluster.gateway_process import GatewayProcess
from cluster.placement import GroupPlan, count_cpus, plan_groups
from cluster.progress import Progress
from cluster.reconcile import backoff_s
from cluster.run_state import RunState
from cluster.worker_spec import WorkerSpec
from kv_transfer.errors import ServingError, WorkerError
from kv_transfer.identity import rank_name
from router.config import GatewayProcessConfig

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GATEWAY_POLL_S = 0.1
GATEWAY_EXIT_GRACE_S = 3.0
"""What the gateway gets beyond its own drain time to close its connections and end."""
LEFTOVER_GRACE_S = 3.0
STOP_RAY_S = 20.0
"""Stopping Ray takes 1 to 2 s; more than this, and it waits for something that will not come."""


class RayLost(WorkerError):
    """Ray's own processes have ended."""

    code = "ray_lost"


class Supervisor:
    """One run of one cluster. `run` it once, on the main thread; `run_dir` is its own."""

    def __init__(self, config: ServeConfig, run_dir: Path, progress: Progress) -> None:
        self._config = config
        self._run_dir = run_dir
        self._log_dir = run_dir / "logs"
        self._progress = progress
        self._secret_path = run_state.write_secret(run_dir)
        self._ray_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._directory = DirectoryHost(
            self._secret_path.read_bytes(), config.cluster.worker_host, lambda entry, now_s: self._fleet.hear(entry, now_s), config.wire
        )
        self._plans = plan_groups(config.pools)
        self._fleet = WorkerFleet(config, self._plans, self._make_spec, self._call_ray, self._directory.mark_gone, progress.event)
        self._gateway: GatewayProcess | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.has_lost_ray = False
        """Whether a call of Ray may never return: then the interpreter cannot end by itself."""
        self._reaper: subprocess.Popen[bytes] | None = None

    async def run(self) -> int:
        """Serve until a signal comes or the start fails. Returns the process's exit code; nothing is left running either way."""
        process_tree.adopt_orphans()
        self._handle_signals()
        try:
            return await self._serve()
        finally:
            await self._shut_down()

    def _handle_signals(self) -> None:
        """Called again once Ray has started, since it puts handlers of its own in the place of ours."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal, number)

    def _take_signal(self, number: signal.Signals) -> None:
        """The first signal stops in order, the second one hurries."""
        if self._stop.is_set():
            self._hurry.set()
            self._fleet.changed.set()
            self._progress.event("hurrying: what runs is given up")
            return
        logger.info("stop requested signal=%s", number.name)
        self._stop.set()

    async def _serve(self) -> int:
        """Start and watch; the tasks end when a stop is requested or one of them fails."""
        stopping = asyncio.ensure_future(self._stop.wait())
        tasks: list[asyncio.Future[None]] = []
        try:
            await self._open_directory()
            tasks = [asyncio.ensure_future(self._keep_gateway()), asyncio.ensure_future(self._start_and_watch())]
            watched: list[asyncio.Future[Any]] = [stopping, *tasks]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except Exception as error:
            # The boundary of this process: whatever it was, everything is ended in order, and the traceback goes to the log.
            logger.exception("the cluster ends")
            reason = str(error) if isinstance(error, ServingError | OSError) else f"{type(error).__name__}: {error}"
            self._progress.text(f"error: {reason}\nLogs: {self._log_dir}")
            return 1
        finally:
            await _cancel(stopping, *tasks)
        return 0

    # -- start ---------------------------------------------------------------------------------------------------------------

    async def _open_directory(self) -> None:
        await self._directory.start()
        gateway_config = dataclasses.replace(
            self._config.gateway,
            directory_host=self._config.cluster.worker_host,
            directory_port=self._directory.port,
            secret_file=str(self._secret_path),
            logging_config_file=self._config.cluster.logging_config_file,
        )
        self._gateway = GatewayProcess(
            GatewayProcessConfig(gateway=gateway_config, router=self._config.router, wire=self._config.wire),
            self._run_dir / "gateway.json",
            self._log_dir / "gateway.log",
        )
        started_at_s = run_state.process_started_at_s(os.getpid())
        assert started_at_s is not None, "this process runs"
        run_state.write_run_state(
            self._run_dir,
            RunState(
                pid=os.getpid(),
                process_started_at_s=started_at_s,
                gateway_url=self._gateway.url,
                directory_host=self._config.cluster.worker_host,
                directory_port=self._directory.port,
                secret_path=str(self._secret_path),
                log_dir=str(self._log_dir),
            ),
        )

    async def _start_and_watch(self) -> None:
        """Bring all workers up side by side, say when the cluster can serve, then look after them until cancelled."""
        cluster = self._config.cluster
        counts = f"{cluster.num_prefill_workers} prefill and {cluster.num_decode_workers} decode"
        self._progress.event(f"starting the gateway, a local Ray and {counts} workers; logs in {self._log_dir}")
        await self._call_ray(ray_session.start_ray, self._run_dir, count_cpus(self._plans), cluster.object_store_bytes)
        self._handle_signals()
        self._progress.event("Ray runs; starting workers")
        self._reaper = process_tree.start_reaper(ray_session.find_agents())
        ray_processes = process_tree.find_children(ray_session.CORE_PROCESSES)
        await self._fleet.place()
        is_announced = False
        while True:
            self._fleet.changed.clear()
            self._check_ray(ray_processes)
            await self._fleet.tick()
            is_announced = is_announced or await self._try_announce()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(cluster.tick_s):
                    await self._fleet.changed.wait()

    def _check_ray(self, processes: list[psutil.Process]) -> None:
        """Raise RayLost when Ray itself has died: workers die with it, and nobody could start new ones."""
        ended = process_tree.find_ended(processes)
        if ended:
            self.has_lost_ray = True
            raise RayLost(f"Ray has died (pid {ended[0]}); its logs: {self._log_dir}/ray")

    async def _try_announce(self) -> bool:
        """Say how to use the cluster if it can serve now, else show what is awaited. Returns whether it could."""
        gateway = self._gateway
        assert gateway is not None, "the directory opens first"
        missing: list[str] = list(self._fleet.missing)
        if not missing and not await gateway.is_ready():
            missing = ["the gateway"]
        if missing:
            self._progress.waiting_for(missing)
            return False
        model = self._config.gateway.model_name
        self._progress.event(f"ready: serving {model} ({self._config.runtime.checkpoint}) on {gateway.url}")
        self._progress.text(
            f"\n  Status page and chat: {gateway.url}/\n"
            f"  curl {gateway.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"""    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Spell the word river."}}]}}'\n\n"""
            f"  Logs: {self._log_dir}   Workers: glm-cluster status   Ctrl-C finishes what runs and stops.\n"
        )
        return True

    async def _keep_gateway(self) -> None:
        """Run the gateway and start it again when it dies. Raises StartFailed when it never came up."""
        gateway, policy = self._gateway, self._config.cluster.restart
        assert gateway is not None, "the directory opens first"
        failures, has_been_ready = 0, False
        while True:
            started_at_s = time.monotonic()
            await gateway.start()
            while gateway.is_running and not has_been_ready:
                has_been_ready = await gateway.is_ready()
                await asyncio.sleep(GATEWAY_POLL_S)
            code = await gateway.wait()
            failures = 1 if time.monotonic() - started_at_s >= policy.stable_after_s else failures + 1
            if not has_been_ready and failures >= policy.max_failed_starts:
                raise StartFailed(f"the gateway failed {failures} times to start, last with exit code {code}")
            logger.warning("gateway lost exit_code=%s failures=%s", code, failures)
            self._progress.event(f"the gateway is gone (exit code {code}); it is started again")
            await asyncio.sleep(backoff_s(failures, policy))

    # -- end -----------------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """End everything in order, each step bounded, and say what had to be given up. Works from any half-way point."""
        self._stop.set()
        for step in (self._end_gateway, self._end_workers, self._end_ray, self._directory.close, self._end_leftovers):
            try:
                await step()
            except Exception:
                # A step that fails must not keep the next ones from ending what they know.
                logger.exception("shutdown step failed step=%s", step.__name__)
        run_state.close_run_dir(self._run_dir)
        self._progress.event("stopped")

    async def _end_gateway(self) -> None:
        gateway = self._gateway
        if gateway is None or not gateway.is_running:
            return
        drain_s = self._config.gateway.drain_s
        self._progress.event(
            f"stopping: the gateway admits nothing more and finishes what runs (at most {drain_s:g} s; Ctrl-C again hurries)"
        )
        gateway.drain()
        ended = asyncio.ensure_future(gateway.wait())
        hurrying = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait([ended, hurrying], timeout=drain_s + GATEWAY_EXIT_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self._progress.event("the gateway was killed with requests in flight")
            gateway.kill()
            await ended
        await _cancel(hurrying)

    async def _end_workers(self) -> None:
        if self.has_lost_ray:  # its calls would wait for it; `_end_leftovers` finds the processes
            return
        killed = await self._fleet.stop_all(self._config.cluster.restart.stop_grace_s, self._hurry)
        if killed:
            self._progress.event(f"killed, as they did not stop in time: {', '.join(killed)}")

    async def _end_ray(self) -> None:
        if self.has_lost_ray:
            return
        try:
            async with asyncio.timeout(STOP_RAY_S):
                await self._call_ray(ray_session.stop_ray)
        except TimeoutError:
            self.has_lost_ray = True
            logger.warning("Ray did not stop within %g s", STOP_RAY_S)

    async def _end_leftovers(self) -> None:
        """Whatever is still below this process, and the reaper, which is among it."""
        loop = asyncio.get_running_loop()
        stubborn = await loop.run_in_executor(None, process_tree.end_descendants, LEFTOVER_GRACE_S)
        if stubborn:
            logger.warning("processes killed at the end pids=%s", stubborn)
        if self._reaper is not None:
            self._reaper.wait()

    # -- plumbing ------------------------------------------------------------------------------------------------------------

    def _make_spec(self, plan: GroupPlan, rank: int) -> WorkerSpec:
        return WorkerSpec(
            worker_id=plan.worker_id,
            role=plan.role,
            rank=rank,
            config=self._config,
            directory_host=self._config.cluster.worker_host,
            directory_port=self._directory.port,
            secret_path=str(self._secret_path),
            log_file=str(self._log_dir / f"{rank_name(plan.worker_id, rank)}.log"),
            logging_config_file=self._config.cluster.logging_config_file,
        )

    async def _call_ray(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run one blocking call on the Ray thread, whose death would end Ray's processes: it lives as long as this one."""
        return await asyncio.get_running_loop().run_in_executor(self._ray_thread, lambda: function(*arguments))


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel and wait, whatever they end with: their results have been taken or are of no use any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
