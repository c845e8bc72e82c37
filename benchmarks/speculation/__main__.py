"""The command line: `python -m benchmarks.speculation [--quick] [--json FILE]`."""

import sys

from benchmarks.speculation.command import main

if __name__ == "__main__":
    sys.exit(main())
