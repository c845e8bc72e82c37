"""What `glm-cluster status` asks the directory of a running cluster, and how it is shown."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from cluster.run_state import RunState
from kv_transfer.config import WireConfig
from kv_transfer.directory import DirectoryClient
from kv_transfer.errors import PeerLost
from kv_transfer.identity import new_incarnation
from kv_transfer.link import Party
from kv_transfer.messages import PartyKind, WorkerEntry, WorkerTable

TOOL_ID = "status"
COLUMNS = (
    "id",
    "role",
    "parallel",
    "pid",
    "state",
    "blocks_free",
    "blocks_cached",
    "blocks_held",
    "num_running",
    "num_waiting",
    "num_transfers",
)


def read_status(run: RunState, timeout_s: float) -> dict[str, Any]:
    """The cluster as plain values, for JSON and for the table. Raises PeerLost and OSError."""
    return describe_run(run, asyncio.run(fetch_table(run, Path(run.secret_path).read_bytes(), timeout_s)))


async def fetch_table(run: RunState, secret: bytes, timeout_s: float) -> WorkerTable:
    """The worker table now. Raises PeerLost when the directory does not answer within `timeout_s`."""
    arrived: asyncio.Future[WorkerTable] = asyncio.get_running_loop().create_future()

    def take(table: WorkerTable) -> None:
        if not arrived.done():
            arrived.set_result(table)

    me = Party(PartyKind.TOOL, TOOL_ID, new_incarnation())
    client = DirectoryClient(secret, me, run.directory_host, run.directory_port, take, config=WireConfig(), rng=random.Random())
    await client.start()
    try:
        async with asyncio.timeout(timeout_s):
            return await arrived
    except TimeoutError:
        raise PeerLost(f"the cluster of process {run.pid} did not answer within {timeout_s:g} s") from None
    finally:
        await client.close()


def describe_run(run: RunState, table: WorkerTable) -> dict[str, Any]:
    """A run and its table as plain values."""
    return {
        "pid": run.pid,
        "url": run.gateway_url,
        "logs": run.log_dir,
        "workers": [describe_worker(entry) for entry in table.entries],
    }


def describe_worker(entry: WorkerEntry) -> dict[str, Any]:
    """One worker as plain values. Free, cached, held and quarantined blocks add up to all blocks."""
    load = entry.load
    return {
        "id": entry.address.worker_id,
        "role": entry.role,
        "pid": entry.pid,
        "parallel": entry.parallel,
        "rank_pids": list(entry.rank_pids),
        "state": entry.state.value,
        "incarnation": f"{entry.address.incarnation:x}",
        "address": f"{entry.address.host}:{entry.address.port}",
        "cache_formats": dict(entry.cache_formats),
        "blocks_total": load.blocks_total,
        "blocks_free": load.blocks_free,
        "blocks_cached": load.blocks_cached,
        "blocks_held": load.blocks_held,
        "blocks_quarantined": load.blocks_quarantined,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_transfers": load.num_transfers,
        "is_pool_audited": entry.is_pool_audited,
        "num_steps": load.num_steps,
        "bytes_read": load.bytes_read,
        "preemptions": load.preemptions,
        "drafted": list(load.drafted),
        "accepted": list(load.accepted),
        "pairs_up": [pair.worker_id for pair in entry.pairs if pair.up],
    }


def render_table(status: dict[str, Any]) -> str:
    """The cluster as text with aligned columns."""
    rows = [COLUMNS, *(tuple(str(worker[column]) for column in COLUMNS) for worker in status["workers"])]
    widths = [max(len(row[number]) for row in rows) for number in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{status['url']}  (supervisor {status['pid']}, logs in {status['logs']})", *lines])


def render_json(status: dict[str, Any]) -> str:
    """The cluster as JSON."""
    return json.dumps(status, indent=1)
