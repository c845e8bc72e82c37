"""What this machine lacks is said before anything starts."""

import dataclasses
import socket
from pathlib import Path

import pytest

from cluster.config import SHIPPED_CHECKPOINT, ServeConfig, resolve
from cluster.preflight import check_disk, check_machine, check_memory, check_port, check_socket_paths, choose_port
from glm_runtime.config import GlmConfig
from kv_transfer.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    """The default, resolved, on a free port and with a state directory of its own."""
    default = resolve(ServeConfig(), GlmConfig.from_checkpoint(SHIPPED_CHECKPOINT), num_cores=2)
    return dataclasses.replace(
        default,
        gateway=dataclasses.replace(default.gateway, port=0),
        cluster=dataclasses.replace(default.cluster, state_dir=str(tmp_path)),
        runtime=dataclasses.replace(default.runtime, cache_bytes=80_000_000),
    )


def test_a_taken_port_is_refused_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway\.port: cannot listen on 127\.0\.0\.1:{port}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        check_port("192.0.2.1", 0)


def test_port_zero_becomes_a_free_port(config: ServeConfig) -> None:
    chosen = choose_port(config)
    assert chosen.gateway.port > 0
    assert choose_port(chosen) == chosen
    check_port("127.0.0.1", chosen.gateway.port)


def test_the_caches_of_all_workers_must_fit_the_memory(config: ServeConfig) -> None:
    check_memory(config)
    huge = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, cache_bytes=1 << 50))
    with pytest.raises(ConfigError, match=r"runtime\.cache_bytes: 2 workers need about"):
        check_memory(huge)


def test_a_state_directory_may_not_be_too_long_for_sockets(tmp_path: Path) -> None:
    check_socket_paths(Path("/tmp/a"))
    with pytest.raises(ConfigError, match=r"cluster\.state_dir: .* is too long"):
        check_socket_paths(Path("/tmp") / ("x" * 60))


def test_disk_is_measured_where_the_directory_will_be(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "yet" / "there")


def test_a_logging_configuration_must_exist(config: ServeConfig) -> None:
    short = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, state_dir="/tmp/a"))
    check_machine(short)
    missing = dataclasses.replace(short, cluster=dataclasses.replace(short.cluster, logging_config_file="/none.json"))
    with pytest.raises(ConfigError, match=r"cluster\.logging_config_file: there is no file /none\.json"):
        check_machine(missing)
