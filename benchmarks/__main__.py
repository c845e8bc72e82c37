"""`make bench`: every benchmark one after the other, with the same options."""

import sys

from benchmarks import attention, gemm, grammars, perplexity, startup
from benchmarks.engine import command as engine

BENCHMARKS = (engine, gemm, attention, grammars, startup, perplexity)

if __name__ == "__main__":
    sys.exit(max(benchmark.main() for benchmark in BENCHMARKS))
