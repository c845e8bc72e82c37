"""How fast this process's threads read memory: the denominator of every share of a memory roofline."""

import time
from collections.abc import Callable

import torch

from glm_runtime.native.library import choose_kernels
from glm_runtime.native_gemm import NativeGemm
from glm_runtime.packed_matrix import pack

ARRAY_BYTES = 1 << 30
REPEATS = 6
_WEIGHT_ROWS, _WEIGHT_COLUMNS, _WEIGHTS = 32768, 1024, 4


def read_bandwidth(num_bytes: int = ARRAY_BYTES) -> float:
    """Bytes a second, the best of several ways to read an array far beyond the caches.

    Sums over floats and over integers, and, where the compiled kernels serve, products of one row with packed weights: these fetch
    ahead and come nearest to what the memory gives, so a share of this figure flatters nobody.
    """
    reads: list[Callable[[], object]] = [torch.ones(num_bytes // 4).sum, torch.ones(num_bytes // 8, dtype=torch.int64).sum]
    best = max(num_bytes / _best_s(read) for read in reads)
    if choose_kernels("auto"):
        weight = torch.full((_WEIGHT_ROWS, _WEIGHT_COLUMNS), 0.5, dtype=torch.bfloat16)
        copies = [pack(weight) for _ in range(_WEIGHTS)]
        row, gemm = torch.ones(1, _WEIGHT_COLUMNS, dtype=torch.bfloat16), NativeGemm()
        total = sum(copy.panels.nbytes for copy in copies)
        best = max(best, total / _best_s(lambda: [gemm.linear(row, copy) for copy in copies]))
    return best


def _best_s(read: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        read()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
