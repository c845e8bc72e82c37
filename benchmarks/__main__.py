"""`make bench`: every benchmark one after the other, with the same options."""

import sys

from benchmarks import gemm, perplexity, startup
from benchmarks.engine import command as engine

BENCHMARKS = (engine, gemm, startup, perplexity)

if __name__ == "__main__":
    sys.exit(max(benchmark.main() for benchmark in BENCHMARKS))
