"""The gateway as a child process: started, watched, asked whether it is ready, drained, ended.

Knows: how `python -m router.gateway` is run and stopped. Does not know requests; the gateway itself finishes them on SIGTERM.
"""

import asyncio
import functools
import os
import signal
import sys
from pathlib import Path

from cluster.process_tree import die_with_parent
from router.config import GatewayProcessConfig, dump_process_config

READY_TIMEOUT_S = 2.0


class GatewayProcess:
    """One gateway at a time; `start` again after it has ended. Call `start` from the main thread: the child ends with that thread."""

    def __init__(self, config: GatewayProcessConfig, config_file: Path, log_file: Path) -> None:
        config_file.write_bytes(dump_process_config(config))
        self._config_file = config_file
        self._log_file = log_file
        host = config.gateway.host
        self._probe_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._port = config.gateway.port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where a client on this host reaches it."""
        host = f"[{self._probe_host}]" if ":" in self._probe_host else self._probe_host
        return f"http://{host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The child's pid while it runs."""
        return self._process.pid if self._process is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether a child was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """How the last child ended; None while it runs or before there was one."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start a child; it is ready some time later."""
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router.gateway", "--config", str(self._config_file),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is the supervisor's to handle: the gateway drains when told
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip

    async def is_ready(self) -> bool:
        """Whether it answers /ready with 200: it can serve a request now."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                return await self._get_status("/ready") == 200
        except (OSError, ValueError, TimeoutError):
            return False

    def drain(self) -> None:
        """Ask it to admit nothing more, finish what runs and end. May be called when it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it now."""
        self._send(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end. Returns its exit code; 0 when there never was one."""
        return 0 if self._process is None else await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self.is_running:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return

    async def _get_status(self, path: str) -> int:
        reader, writer = await asyncio.open_connection(self._probe_host, self._port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._probe_host}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            return int((await reader.readline()).split()[1])
        except IndexError:
            return 0
        finally:
            writer.close()
