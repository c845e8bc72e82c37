"""The command line of this benchmark."""

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.engine.run import measure
from benchmarks.report import run_benchmark

RESUME = "--resume"


def main(arguments: Sequence[str] | None = None) -> int:
    """As every benchmark's; with --resume, measurements that an interrupted run of the same commit has finished are kept."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_resumed = RESUME in words
    return run_benchmark("engine", partial(measure, is_resumed=is_resumed), [word for word in words if word != RESUME])
