"""Quantised checkpoints through the whole cluster: `serve` answers what `glm-cluster run` answers, and both read the packed weights."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.running_cluster import COMMAND, start_cluster, token_ids

pytestmark = pytest.mark.cluster

TEXTS = ("Name the days of the week, one after the other.", "a", "The river runs past the old mill and " * 12)
MAX_TOKENS = 16
ODD_HEADS = ("qk_nope_head_dim=192", "v_head_dim=256", "num_attention_heads=3", "num_hidden_layers=5")
"""448 rows of kv_b a head, as GLM-5.3 has: three and a half blocks of the scales."""


def _make(directory: Path, *options: str) -> Path:
    done = subprocess.run([COMMAND, "make-checkpoint", str(directory), *options], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return directory


def _formats(checkpoint: Path) -> dict[str, int]:
    """How many matrices there are of each format, by `glm-cluster inspect`."""
    done = subprocess.run(
        [COMMAND, "inspect", str(checkpoint), "--json", "--gpus", "1"], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(done.stdout)["tensors"]["matrices_by_format"])


def _run(checkpoint: Path, directory: Path) -> list[list[int]]:
    """Token ids that one process answers."""
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    words = (
        "--file",
        str(file),
        "--raw",
        "--json",
        "--temperature",
        "0",
        "--ignore-eos",
        "--max-tokens",
        str(MAX_TOKENS),
        "--threads",
        "1",
    )
    done = subprocess.run(
        [COMMAND, "run", "--checkpoint", str(checkpoint), *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [answer["token_ids"] for answer in json.loads(done.stdout)["answers"]]


def _serve(checkpoint: Path) -> list[list[int]]:
    """Token ids that a cluster answers."""
    running = start_cluster("--checkpoint", str(checkpoint))
    try:
        return [token_ids(running.complete(text, MAX_TOKENS)) for text in TEXTS]
    finally:
        running.stop()


def test_nvfp4_experts(tmp_path: Path) -> None:
    """A random model: a trained one may well say the same with other weights."""
    checkpoint = _make(tmp_path / "nvfp4", "--weights", "nvfp4", "--size", "small", "--set", "num_hidden_layers=5")
    assert _formats(checkpoint)["nvfp4"] > 0
    answers = _run(checkpoint, tmp_path)
    assert len({tuple(answer) for answer in answers}) > 1
    assert _serve(checkpoint) == answers


def test_block_fp8_in_two_shards_with_odd_heads(tmp_path: Path) -> None:
    options = [word for change in ODD_HEADS for word in ("--set", change)]
    checkpoint = _make(tmp_path / "fp8", "--weights", "fp8", "--size", "small", *options, "--shard-gb", "0.006")
    assert len(list(checkpoint.glob("model-*-of-00002.safetensors"))) == 2
    assert _formats(checkpoint)["block-fp8"] > 0
    answers = _run(checkpoint, tmp_path)
    assert len({tuple(answer) for answer in answers}) > 1
    assert _serve(checkpoint) == answers
