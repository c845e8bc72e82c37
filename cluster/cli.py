"""The `glm-cluster` command: arguments in, exit codes out. 0 is success, 1 a failed run, 2 a mistake of the caller.

Knows: commands and options. What they do lives in the modules that they import when they are used, so that `--version` and
`status` answer at once.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli_checkpoint import add_checkpoint_commands
from cluster.cli_run import add_run_command
from kv_transfer.errors import ConfigError, ServingError

if TYPE_CHECKING:
    from cluster.config import ServeConfig

DISTRIBUTION = "glm-cluster"
STATUS_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; raises SystemExit only for --help, --version and unusable arguments."""
    options = _make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        _complain(str(error))
        return 2
    except ServingError as error:
        _complain(str(error))
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=DISTRIBUTION, description="A disaggregated prefill/decode serving cluster for GLM-5.3.")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start a cluster on this machine and serve until Ctrl-C")
    _add_config_options(serve)
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check-config", help="print the effective configuration, or every mistake at once")
    check.add_argument("file", type=Path, metavar="FILE", help="a TOML configuration file")
    check.set_defaults(run=_check_config)

    status = commands.add_parser("status", help="show the workers of the cluster that runs on this machine")
    status.add_argument("--json", action="store_true", help='print {"workers": [...]} as JSON')
    status.add_argument("--pid", type=int, help="the supervisor's pid, where several clusters run (default: the newest)")
    status.add_argument("--state-dir", type=Path, help="where the cluster keeps its state (default: as serve's default)")
    status.set_defaults(run=_status)
    add_run_command(commands)
    add_checkpoint_commands(commands)
    return parser


SERVE_OPTIONS = (
    ("--prefill", "cluster.num_prefill_workers", int, "N", "prefill workers (default 1)"),
    ("--decode", "cluster.num_decode_workers", int, "N", "decode workers (default 1)"),
    ("--prefill-tp", "prefill.parallel.tp_size", int, "N", "ranks of a prefill worker that share heads and columns (default 1)"),
    ("--prefill-pcp", "prefill.parallel.pcp_size", int, "N", "ranks of a prefill worker that share a prompt's rows (default 1)"),
    ("--decode-tp", "decode.parallel.tp_size", int, "N", "ranks of a decode worker that share heads and columns (default 1)"),
    ("--decode-dcp", "decode.parallel.dcp_size", int, "N", "of these, ranks that share each request's cache (default 1)"),
    ("--host", "gateway.host", str, "HOST", "address the gateway listens on (default 127.0.0.1)"),
    ("--port", "gateway.port", int, "PORT", "port the gateway listens on (default 8000; 0 takes a free one)"),
    ("--checkpoint", "runtime.checkpoint", str, "DIR", "checkpoint to serve (default: the shipped one)"),
    ("--state-dir", "cluster.state_dir", str, "DIR", "where addresses and logs of runs are kept"),
)
"""Options of `serve` that set a field of the configuration: flag, the field's path, type, placeholder, help."""


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML configuration file (default: all defaults)")
    for flag, path, kind, placeholder, text in SERVE_OPTIONS:
        parser.add_argument(flag, type=kind, dest=path, metavar=placeholder, help=text)


def _serve(options: argparse.Namespace) -> int:
    from cluster.config_file import Option, load_config
    from cluster.preflight import check_machine, choose_port

    values = vars(options)
    given = [Option(path, flag, values[path]) for flag, path, *_ in SERVE_OPTIONS if values[path] is not None]
    config, _ = load_config(options.config, given)
    check_machine(config)
    return _run_cluster(choose_port(config))


def _run_cluster(config: "ServeConfig") -> int:
    from cluster import ray_session, run_state
    from cluster.config_file import render_config
    from cluster.progress import Progress
    from cluster.supervisor import Supervisor

    run_dir = run_state.make_run_dir(Path(config.cluster.state_dir))
    _log_to(run_dir / "logs" / "supervisor.log", Path(config.cluster.logging_config_file))
    logging.getLogger(__name__).info("effective configuration\n%s", render_config(config))
    ray_session.set_ray_environment()

    async def run() -> int:
        supervisor = Supervisor(config, run_dir, Progress())
        code = await supervisor.run()
        if supervisor.has_lost_ray:  # its threads wait for what does not come, and leaving the interpreter would wait for them
            logging.shutdown()
            os._exit(code)
        return code

    return asyncio.run(run())


def _check_config(options: argparse.Namespace) -> int:
    from cluster.config_file import load_config, render_config

    config, _ = load_config(options.file)
    print(render_config(config), end="")
    return 0


def _status(options: argparse.Namespace) -> int:
    from cluster.cluster_status import read_status, render_json, render_table
    from cluster.run_state import default_state_dir, find_runs

    runs = find_runs(options.state_dir or default_state_dir())
    if options.pid is not None:
        runs = [run for run in runs if run.pid == options.pid]
    if not runs:
        _complain("no cluster of this user runs on this machine; start one with: glm-cluster serve")
        return 1
    if len(runs) > 1:
        _complain(f"{len(runs)} clusters run here, this is the newest; others: --pid {', '.join(str(run.pid) for run in runs[1:])}")
    status = read_status(runs[0], STATUS_TIMEOUT_S)
    print(render_json(status) if options.json else render_table(status))
    return 0


def _log_to(log_file: Path, logging_config_file: Path) -> None:
    """The shipped logging configuration writes to stderr; here the terminal belongs to the progress lines."""
    from cluster.worker_spec import configure_logging

    configure_logging(logging_config_file)
    stream = log_file.open("a", encoding="utf-8", buffering=1)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(stream)


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"{DISTRIBUTION}: {line}", file=sys.stderr)
