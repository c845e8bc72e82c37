"""`glm-cluster run`: generation in this process. Answers go to stdout; thinking, progress and statistics to stderr."""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_transfer.errors import ConfigError, PromptTooLong

if TYPE_CHECKING:
    from cluster.offline_run import OfflineAnswer, RunStatistics
    from router.gateway.answer import TextDelta

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

MIB = 1 << 20
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
INTERRUPTED = 130

REQUEST_OPTIONS = (
    ("--max-tokens", "max_tokens", int, "N", "most output tokens of a prompt (default 256, or the rest of the context)"),
    ("--temperature", "temperature", float, "T", "0 is greedy (default: the checkpoint's)"),
    ("--top-p", "top_p", float, "P", "draw from the most likely tokens with this much probability"),
    ("--top-k", "top_k", int, "K", "draw from the K most likely tokens"),
    ("--seed", "seed", int, "N", "of the draws (default: another one each time)"),
)
"""Options that are fields of every request: flag, field, type, placeholder, help."""


def add_run_command(commands: "Commands") -> None:
    """Add the parser; it sets `run`, which takes the parsed options and returns the exit code."""
    run = commands.add_parser(
        "run",
        help="generate in this process, without a cluster",
        description="Generate in one process, without workers: what a cluster's answers are compared with.",
    )
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    run.add_argument("--file", metavar="FILE", help="one prompt per line, or JSONL (.jsonl) with messages or prompt; - is standard input")
    run.add_argument("--jsonl", action="store_true", help="the lines of --file are JSON objects, whatever its name")
    run.add_argument("--raw", action="store_true", help="the text is the prompt itself, without the chat template")
    run.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    for flag, name, kind, placeholder, text in REQUEST_OPTIONS:
        run.add_argument(flag, type=kind, dest=name, metavar=placeholder, help=text)
    run.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")
    run.add_argument("--ignore-eos", action="store_true", default=None, help="do not end at the model's end tokens")
    run.add_argument("--effort", choices=("low", "high", "max"), dest="reasoning_effort", help="how long to think (chat)")
    run.add_argument("--checkpoint", type=Path, metavar="DIR", help="checkpoint to run (default: the shipped one)")
    run.add_argument("--numerics", choices=("deterministic", "fast"), default="deterministic", help="as runtime.numerics")
    run.add_argument("--cache-format", default="auto", metavar="FORMAT", help="as runtime.cache_format")
    run.add_argument("--index-format", default="auto", metavar="FORMAT", help="as runtime.index_format")
    run.add_argument("--drafts", type=int, metavar="K", help="most drafts of a step, 0 is none (default: as runtime.max_drafts)")
    run.add_argument("--cache-mib", type=int, default=1024, metavar="MIB", help="most memory for the cache (default 1024)")
    run.add_argument("--threads", type=int, metavar="N", help="threads (default: torch's choice)")
    run.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts that are computed side by side (default 16)")
    run.add_argument("--json", action="store_true", help="print one JSON object at the end")
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        return _generate(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _generate(options: argparse.Namespace) -> int:
    from cluster.offline_prompts import read_prompts

    for flag in ("batch_size", "cache_mib"):
        if getattr(options, flag) < 1:
            raise ConfigError(f"is {getattr(options, flag)}; expected at least 1", path=f"--{flag.replace('_', '-')}")
    given = read_prompts(options.prompt, options.file, is_jsonl=options.jsonl, stdin=sys.stdin)

    from cluster.offline_run import OfflineRun, answer_all, describe_run
    from cluster.terminal import progress_bar

    run = OfflineRun(_runtime_config(options))
    answers = run.prepare(given, _request_defaults(options), is_raw=options.raw, system=options.system)
    started_at_s = time.monotonic()
    with progress_bar("loading weights", in_bytes=True) as loaded:
        runtime = run.load(loaded)
    load_s = time.monotonic() - started_at_s
    streams = len(answers) == 1 and not options.json
    with nullcontext() if streams else progress_bar("generating tokens") as drawn:
        try:
            statistics = answer_all(
                runtime,
                answers,
                load_s=load_s,
                batch_size=options.batch_size,
                on_delta=_Stream().write if streams else None,
                on_count=drawn,
            )
        except PromptTooLong as error:
            raise ConfigError(f"{error.message} tokens. Raise it, or lower --max-tokens", path="--cache-mib") from None
    if options.json:
        print(json.dumps(describe_run(answers, statistics), ensure_ascii=False))
    elif not streams:
        _print_answers(answers)
    _print_statistics(statistics)
    return 0


def _runtime_config(options: argparse.Namespace) -> Any:
    from cluster.config import SHIPPED_CHECKPOINT
    from glm_runtime.runtime_config import RuntimeConfig

    checkpoint = options.checkpoint or SHIPPED_CHECKPOINT
    if not checkpoint.is_dir():
        raise ConfigError(f"there is no directory {checkpoint}", path="--checkpoint")
    drafts = {} if options.drafts is None else {"max_drafts": options.drafts}
    return RuntimeConfig(
        checkpoint=checkpoint,
        **drafts,
        cache_format=options.cache_format,
        index_format=options.index_format,
        numerics=options.numerics,
        num_threads=options.threads,
        cache_bytes=options.cache_mib * MIB,
    )


def _request_defaults(options: argparse.Namespace) -> dict[str, Any]:
    names = (*(name for _, name, *_ in REQUEST_OPTIONS), "stop", "ignore_eos")
    defaults = {name: getattr(options, name) for name in names}
    if options.reasoning_effort is not None:
        defaults["chat_template_kwargs"] = {"reasoning_effort": options.reasoning_effort}
    return defaults


class _Stream:
    """One answer as it grows: thinking dimmed on stderr, the answer on stdout."""

    def __init__(self) -> None:
        self._marks = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
        self._has_thought = False

    def write(self, number: int, delta: "TextDelta") -> None:  # noqa: ARG002 - there is one prompt
        """Show new text at once."""
        if delta.reasoning:
            self._has_thought = True
            print(self._marks[0] + delta.reasoning + self._marks[1], end="", file=sys.stderr, flush=True)
        if delta.content and self._has_thought:
            self._has_thought = False
            print(file=sys.stderr, flush=True)
        print(delta.content, end="" if delta.finish_reason is None else "\n", flush=True)


def _print_answers(answers: "list[OfflineAnswer]") -> None:
    for number, answer in enumerate(answers, start=1):
        print(f"--- {number} of {len(answers)} ({answer.place}, {answer.text.finish_reason})")
        print(answer.content)


def _print_statistics(statistics: "RunStatistics") -> None:
    from cluster.offline_run import render_statistics

    print(render_statistics(statistics), file=sys.stderr)
