"""The command line: `python -m benchmarks.parallel [--quick] [--json FILE]`."""

import sys

from benchmarks.parallel.command import main

if __name__ == "__main__":
    sys.exit(main())
