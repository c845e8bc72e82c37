"""The command line: `python -m benchmarks.engine [--quick] [--json FILE] [--resume]`."""

import sys

from benchmarks.engine.command import main

if __name__ == "__main__":
    sys.exit(main())
