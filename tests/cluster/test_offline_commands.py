"""The commands that need no cluster, as a person would type them."""

import json
import subprocess
from pathlib import Path

from tests.glm_checkpoints import GLM53_FIELDS
from tests.running_cluster import COMMAND


def _run(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([COMMAND, *arguments], input=text, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def _refused(expected: str, *arguments: str, text: str = "") -> None:
    done = _run(*arguments, text=text)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert not done.stdout


def test_inspect_prints_text_or_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM53_FIELDS))
    done = _run("inspect", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "= 753,329,940,480" in done.stdout
    report = json.loads(_run("inspect", str(tmp_path), "--json").stdout)
    assert report["parameters"]["mtp"] == 9_952_920_576


def test_make_checkpoint_then_convert_then_inspect(tmp_path: Path) -> None:
    made, converted = str(tmp_path / "made"), str(tmp_path / "converted")
    done = _run("make-checkpoint", made, "--set", "num_hidden_layers=5", "--set", "hidden_size=64", "--seed", "7", "--shard-gb", "0.001")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {made}: ")
    assert _run("make-checkpoint", converted, "--from", made, "--weights", "fp8").returncode == 0
    tensors = json.loads(_run("inspect", converted, "--json", "--gpus", "1").stdout)["tensors"]
    assert set(tensors["matrices_by_format"]) == {"plain", "block-fp8"}
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    _refused("config.json: cannot be read", "inspect", str(tmp_path))
    _refused("--gpus: is 0", "inspect", str(tmp_path), "--gpus", "0")
    target = str(tmp_path / "target")
    _refused("hiden: is not a field that can be set", "make-checkpoint", target, "--set", "hiden=3")
    _refused("--set: is 'hidden_size'; expected FIELD=VALUE", "make-checkpoint", target, "--set", "hidden_size")
    _refused("vocabulary has 100", "make-checkpoint", target, "--set", "vocab_size=100")
    _refused("--seed: cannot be given with --from", "make-checkpoint", target, "--from", str(tmp_path), "--seed", "3")
    assert not list(tmp_path.glob("target/*.safetensors"))
