"""The local Ray of one run: started for it alone, never shared, gone with it.

Knows: how Ray is kept small and closed (own folder, own namespace, token authentication, loopback only) and how it ends.
Does not know workers (`actors.py`) or when to start what (`supervisor.py`).

Ray's processes are children of the thread that calls `start_ray` and end with it (PR_SET_PDEATHSIG works by thread), so that
thread must live as long as the run.
"""

import logging
import os
import secrets
from pathlib import Path

import psutil

NAMESPACE = "glm-cluster"
GCS_RECONNECT_S = 5
"""A lost control store does not come back here: whoever waits for it shall end soon, not after a minute."""
CORE_PROCESSES = frozenset({"gcs_server", "raylet"})
"""Without them no worker can be watched or started."""
MIN_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray refuses less than about 75 MiB. Nothing is ever put there: no Ray object is on the path of a request."""


def set_ray_environment() -> None:
    """Set what Ray reads from the environment when it is imported. To be called before the first `import ray`.

    The authentication mode is always explicit: left alone, `ray.init` would write a token to the user's home, and its mere
    presence changes how every later Ray of that user starts.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(GCS_RECONNECT_S)  # noqa: SIM112 - Ray spells it so
    os.environ.pop("RAY_ADDRESS", None)


def start_ray(run_dir: Path, num_cpus: float, object_store_bytes: int) -> None:
    """Start a Ray of our own below `run_dir` that offers `num_cpus`. Blocks for about 4 s; raises RuntimeError and OSError."""
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that SIGTERM is not its own: the supervisor handles signals
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=max(1, -int(-num_cpus // 1)),
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=max(MIN_OBJECT_STORE_BYTES, object_store_bytes),
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(run_dir / "ray"),
        _node_ip_address="127.0.0.1",
    )


def find_agents() -> list[int]:
    """The pids of Ray's agents below this process: the only ones that outlive their raylet for long (a minute) when it is killed."""
    return [process.pid for process in psutil.Process().children(recursive=True) if _is_agent(" ".join(process.cmdline()))]


def _is_agent(command: str) -> bool:
    """Before and after the agent has given itself another title."""
    return (command.startswith("ray::") and "Agent" in command) or "/dashboard/agent.py" in command or "/agent/main.py" in command


def stop_ray() -> None:
    """End Ray and everything that it started. May be called when it never started."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
