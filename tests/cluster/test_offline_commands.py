"""The commands that need no cluster, as a person would type them."""

import json
import signal
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
    (line,) = done.stderr.splitlines()
    assert expected in line
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
    target = str(tmp_path / "target")
    _refused("--set: is 'hidden_size'; expected FIELD=VALUE", "make-checkpoint", target, "--set", "hidden_size")
    _refused("vocabulary has 100", "make-checkpoint", target, "--set", "vocab_size=100")
    _refused("--seed: cannot be given with --from", "make-checkpoint", target, "--from", str(tmp_path), "--seed", "3")
    assert not list(tmp_path.glob("target/*.safetensors"))


def test_run_streams_one_answer_and_reports_its_speed() -> None:
    done = _run("run", "Name the days.", "--temperature", "0", "--max-tokens", "9", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "output tokens in" in done.stderr.splitlines()[-1]
    piped = _run("run", "-", "--temperature", "0", "--max-tokens", "9", "--threads", "1", text="Name the days.")
    assert piped.stdout == done.stdout


def test_run_answers_a_file_as_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Spell the word cat."}, {"messages": [{"role": "user", "content": "Name the days."}], "max_tokens": 3}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = _run("run", "--file", str(file), "--json", "--max-tokens", "5", "--seed", "4", "--ignore-eos", "--threads", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [len(answer["token_ids"]) for answer in report["answers"]] == [5, 3]
    assert report["statistics"]["num_output_tokens"] == 8


def test_run_refuses_before_it_loads() -> None:
    _refused("PROMPT: give a prompt, or a file", "run")
    _refused("PROMPT: temperature", "run", "x", "--temperature", "9")


def test_run_can_be_interrupted() -> None:
    command = [COMMAND, "run", "Name the days.", "--ignore-eos", "--max-tokens", "8000", "--raw", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1), "it streams"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert running.stderr.read().split() == [b"interrupted"]
