"""The kernels of one layer, a folder each: `__init__` checks and dispatches, `reference.py` specifies, `cpu.py` serves."""
