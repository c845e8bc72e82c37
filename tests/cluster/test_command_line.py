"""What is wrong is said in one line before anything starts: exit code 2, no traceback, no process."""

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from cluster.config import SHIPPED_CHECKPOINT
from tests.running_cluster import COMMAND, environment


def _run(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60, env=environment(tmp_path))
    assert "Traceback" not in done.stdout + done.stderr
    return done


def _assert_refused(tmp_path: Path, expected: str, *arguments: str) -> None:
    done = _run(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert expected in line
    assert not done.stdout
    assert not list(tmp_path.glob("glm-cluster-*/*")), "a run was begun"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint to break."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        (copy / name).write_bytes((SHIPPED_CHECKPOINT / name).read_bytes())
    return copy


def test_a_typo_in_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[decode]\nmax_runing = 3\n")
    _assert_refused(tmp_path, f"{file}: decode.max_runing: unknown key; did you mean max_running?", "serve", "--config", str(file))
    _assert_refused(tmp_path, f"{file}: decode.max_runing: unknown key; did you mean max_running?", "check-config", str(file))


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    _assert_refused(
        tmp_path, f"--checkpoint (runtime.checkpoint): there is no directory {tmp_path}/none", "serve", "--checkpoint", f"{tmp_path}/none"
    )


def test_a_truncated_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    _assert_refused(tmp_path, f"{weights}", "serve", "--checkpoint", str(checkpoint))


def test_a_corrupt_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"\xff" * 4096)
    _assert_refused(tmp_path, f"{weights}", "serve", "--checkpoint", str(checkpoint))


def test_a_checkpoint_whose_config_does_not_fit_its_tensors(tmp_path: Path, checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 128'))
    _assert_refused(tmp_path, "model.safetensors", "serve", "--checkpoint", str(checkpoint))


def test_a_config_json_field_of_the_wrong_type(tmp_path: Path, checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"kv_lora_rank": 512', '"kv_lora_rank": "512"'))
    _assert_refused(tmp_path, "kv_lora_rank", "serve", "--checkpoint", str(checkpoint))


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _assert_refused(tmp_path, f"gateway.port: cannot listen on 127.0.0.1:{port}", "serve", "--port", str(port))


def test_more_cache_than_memory(tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(f"[runtime]\ncache_bytes = {psutil.virtual_memory().total}\n")
    _assert_refused(tmp_path, "runtime.cache_bytes: 2 workers need about", "serve", "--port", "0", "--config", str(file))


def test_check_config_prints_what_serve_would_use(tmp_path: Path) -> None:
    file = tmp_path / "good.toml"
    file.write_text("[cluster]\nnum_decode_workers = 3\n")
    done = _run(tmp_path, "check-config", str(file))
    assert done.returncode == 0
    assert "num_decode_workers = 3" in done.stdout
    assert 'cache_format = "bf16"' in done.stdout


def test_status_without_a_cluster_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, "status", "--json")
    assert done.returncode == 1
    assert "no cluster of this user runs on this machine" in done.stderr


def test_the_version_is_the_distributions() -> None:
    assert subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout.startswith("glm-cluster 0.")
