"""The command line: `python -m benchmarks.scheduler [--quick] [--json FILE]`."""

import sys

from benchmarks.scheduler.command import main

if __name__ == "__main__":
    sys.exit(main())
