"""How long a newcomer waits: from `glm-cluster serve` to the first token (warm: packages installed and compiled), and to its end."""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import ROOT, Row, run_benchmark

COMMAND = Path(sys.executable).parent / "glm-cluster"
GOAL_S = 25.0
TIMEOUT_S = 180.0
QUESTION = {"model": "glm", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Spell the word river."}]}


def measure(quick: bool) -> list[Row]:
    """Start, ask and stop a few times; medians."""
    repeats = 1 if quick else 5
    runs = [_start_ask_stop() for _ in range(repeats)]
    ready_s, first_token_s, stop_s = (statistics.median(values) for values in zip(*runs, strict=True))
    has_torch = _gateway_loads("torch")
    goal = f"<= {GOAL_S:g}"
    is_met = first_token_s <= GOAL_S
    return [
        Row(target="12", what="serve to first token, warm", value=first_token_s, unit="s", goal=goal, met=is_met, repeats=repeats),
        Row(target="12", what="serve to ready, warm", value=ready_s, unit="s", goal="-", met=True, repeats=repeats),
        Row(target="12", what="Ctrl-C to nothing left", value=stop_s, unit="s", goal="-", met=True, repeats=repeats),
        Row(target="12", what="gateway without torch", value="no" if has_torch else "yes", unit="-", goal="yes", met=not has_torch),
    ]


def _start_ask_stop() -> tuple[float, float, float]:
    """Seconds to ready, to the first token (both from the start) and from SIGINT to the end."""
    state_dir = tempfile.mkdtemp(prefix="glmb-")
    started_s = time.monotonic()
    process = subprocess.Popen(
        [str(COMMAND), "serve", "--port", "0", "--state-dir", state_dir],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        url = _wait_for_url(process)
        ready_s = time.monotonic() - started_s
        _ask(url)
        first_token_s = time.monotonic() - started_s
        stopped_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
        return ready_s, first_token_s, time.monotonic() - stopped_s
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(state_dir, ignore_errors=True)


def _wait_for_url(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if "ready: serving" in line:
            return line.rsplit(" on ", 1)[1].strip()
    raise SystemExit(f"serve ended before it was ready:\n{''.join(seen)}")


def _ask(url: str) -> None:
    """Send one chat request and return at its first piece of text, thinking included."""
    body = json.dumps(QUESTION).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
                return
    raise SystemExit("the stream ended without a token")


def _has_text(event: dict[str, list[dict[str, dict[str, str]]]]) -> bool:
    return any(choice["delta"].get("content") or choice["delta"].get("reasoning_content") for choice in event.get("choices", []))


def _gateway_loads(module: str) -> bool:
    program = f"import sys, router.gateway.__main__; print({module!r} in sys.modules)"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "True"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_benchmark("startup", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
