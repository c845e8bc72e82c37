"""`make bench`: every benchmark one after the other, with the same options."""

import sys

from benchmarks import attention, gemm, grammars, perplexity, startup
from benchmarks.engine import command as engine
from benchmarks.parallel import command as parallel
from benchmarks.scheduler import command as scheduler
from benchmarks.speculation import command as speculation

BENCHMARKS = (engine, gemm, attention, scheduler, speculation, parallel, grammars, startup, perplexity)

if __name__ == "__main__":
    sys.exit(max(benchmark.main() for benchmark in BENCHMARKS))
