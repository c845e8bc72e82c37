"""What is checked on this machine before anything starts: the port, memory, disk. Each check raises ConfigError naming the field."""

import dataclasses
import os
import socket
from pathlib import Path

import psutil

from cluster.config import ServeConfig, needed_memory_bytes
from glm_runtime.config import GlmConfig
from glm_runtime.weight_memory import expected_weight_bytes
from kv_transfer.errors import ConfigError

MIB = 1024 * 1024
MAX_SOCKET_PATH_BYTES = 107
RAY_SOCKET_BELOW_STATE_DIR = "r{pid}/ray/session_2026-11-30_12-00-00_123456_{pid}/sockets/plasma_store"
"""What such a path looks like, below the state directory."""
NEEDED_DISK_BYTES = 256 * MIB
"""Ray's session folder, its shared memory file where /dev/shm is too small, and logs."""


def check_machine(config: ServeConfig) -> None:
    """Raise ConfigError for the first thing that this machine lacks."""
    check_port(config.gateway.host, config.gateway.port)
    check_memory(config)
    check_socket_paths(Path(config.cluster.state_dir))
    check_disk(Path(config.cluster.state_dir))
    if not Path(config.cluster.logging_config_file).is_file():
        raise ConfigError(f"there is no file {config.cluster.logging_config_file}", path="cluster.logging_config_file")


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when nobody could listen there."""
    try:
        with _bind(host, port) as probe:
            probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); end what uses it or choose another port with --port",
            path="gateway.port",
        ) from None


def choose_port(config: ServeConfig) -> ServeConfig:
    """The configuration with a free port in the place of 0: a gateway that is started again must be found where it was."""
    if config.gateway.port != 0:
        return config
    with _bind(config.gateway.host, 0) as probe:
        port = int(probe.getsockname()[1])
    return dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=port))


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def check_memory(config: ServeConfig) -> None:
    """Raise ConfigError when the workers would not fit into the memory that is available now."""
    model = GlmConfig.from_checkpoint(config.runtime.checkpoint)
    weight_bytes = {pool.role: expected_weight_bytes(model, config.runtime_of(pool.role)) for pool in config.pools}
    needed, available = needed_memory_bytes(config, weight_bytes), psutil.virtual_memory().available
    if needed > available:
        num_workers = sum(pool.num_workers for pool in config.pools)
        who = f"{num_workers} workers" if num_workers == config.num_ranks else f"{config.num_ranks} ranks of {num_workers} workers"
        raise ConfigError(
            f"{who} need about {needed // MIB} MiB, {available // MIB} MiB are available; lower it "
            f"(now {config.runtime.cache_bytes // MIB} MiB each) or start fewer workers",
            path="runtime.cache_bytes",
        )


def check_socket_paths(state_dir: Path) -> None:
    """Raise ConfigError when the paths of Ray's sockets below the state directory would be longer than the system allows."""
    longest = f"{state_dir.absolute()}/{RAY_SOCKET_BELOW_STATE_DIR.format(pid=os.getpid())}"
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{state_dir} is too long: Ray's socket paths below it may have {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one",
            path="cluster.state_dir",
        )


def check_disk(state_dir: Path) -> None:
    """Raise ConfigError when Ray and the logs would not fit where the run keeps its files."""
    place = next(folder for folder in (state_dir, *state_dir.absolute().parents) if folder.exists())
    free = psutil.disk_usage(str(place)).free
    if free < NEEDED_DISK_BYTES:
        raise ConfigError(f"{free // MIB} MiB are free in {place}, {NEEDED_DISK_BYTES // MIB} MiB are needed", path="cluster.state_dir")
