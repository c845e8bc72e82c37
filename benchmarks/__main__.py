"""`make bench`: every benchmark one after the other, with the same options."""

import sys

from benchmarks import perplexity, startup
from benchmarks.engine import command as engine

BENCHMARKS = (engine, startup, perplexity)

if __name__ == "__main__":
    sys.exit(max(benchmark.main() for benchmark in BENCHMARKS))
