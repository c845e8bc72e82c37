"""A real gateway as a child process, in front of a fake cluster."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kv_transfer.config import WireConfig
from router.config import GatewayConfig, GatewayProcessConfig, RouterConfig, dump_process_config
from tests.fakes.fake_workers import SECRET, WIRE

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
START_TIMEOUT_S = 60.0


@dataclass
class RunningGateway:
    """url: without a slash at the end."""

    url: str
    port: int
    process: "subprocess.Popen[bytes]"
    log_file: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def wait_until_ready(self, timeout_s: float = 20.0) -> None:
        wait_for(lambda: self.get("/ready").status_code == 200, timeout_s, "the gateway is ready")

    def log(self) -> str:
        return self.log_file.read_text()


def wait_for(condition: Any, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Poll until it holds; AssertionError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)


@contextlib.contextmanager
def running_gateway(
    folder: Path,
    directory_port: int,
    *,
    gateway: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    wire: WireConfig = WIRE,
) -> Iterator[RunningGateway]:
    """Start `python -m router.gateway` on a free port and stop it as the supervisor would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret").write_bytes(SECRET)
    fields: dict[str, Any] = {
        "port": 0,
        "tokenizer_dir": str(TINY),
        "directory_port": directory_port,
        "secret_file": str(folder / "secret"),
        "drain_s": 5.0,
        **(gateway or {}),
    }
    config = GatewayProcessConfig(gateway=GatewayConfig(**fields), router=RouterConfig(**(router or {})), wire=wire)
    (folder / "gateway.json").write_bytes(dump_process_config(config))
    log_file = folder / "gateway.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.gateway", "--config", str(folder / "gateway.json")], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        port = _wait_for_port(process, log_file)
        yield RunningGateway(f"http://127.0.0.1:{port}", port, process, log_file)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        finally:
            process.kill()


def _wait_for_port(process: "subprocess.Popen[bytes]", log_file: Path) -> int:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = re.search(r"gateway listening host=\S+ port=(\d+)", log_file.read_text())
        if found:
            return int(found[1])
        assert process.poll() is None, f"the gateway ended: {log_file.read_text()}"
        time.sleep(0.02)
    raise AssertionError(f"the gateway did not listen: {log_file.read_text()}")
