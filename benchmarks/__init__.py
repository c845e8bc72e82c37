"""Measures of what the project promises: each module is `python -m benchmarks.NAME [--quick] [--json FILE]`."""
