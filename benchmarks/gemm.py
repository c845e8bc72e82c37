"""The compiled matrix products at the shapes of a model: bytes of weights a second against what this machine reads, and FLOP/s.

Decode rows are timed over copies of the weight that together exceed the caches, so that every weight comes from memory. Torch is
timed at the same shapes with the same threads. Minima of single calls: a busy machine makes them worse, never better.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.read_bandwidth import read_bandwidth
from benchmarks.report import Row, run_benchmark
from glm_runtime.linear import Gemm
from glm_runtime.native_gemm import NativeGemm
from glm_runtime.ops.moe_experts import moe_experts
from glm_runtime.packed_matrix import PackedMatrix, empty_panels, pack, pack_into

Operands = TypeVar("Operands")

COLD_BYTES = 160 << 20
"""Of weights in turn: several times the last-level cache."""
DECODE_ROWS, PREFILL_ROWS = (1, 4, 8, 16), (128, 512)
SHARE_GOALS = {1: 80.0, 4: 80.0, 8: 80.0, 16: 65.0}
"""Percent of the read bandwidth, bf16 rows, by number of rows."""
FLOP_GOALS = {"bf16": 700.0, "fp32": 300.0}
"""GFLOP/s from 128 rows on, by the rows' dtype, on two cores."""

SHAPES = {
    "q_a + kv_a": (1088, 1024),
    "q_b": (3072, 512),
    "o": (1024, 2048),
    "dense gate_up": (6144, 1024),
    "dense down": (1024, 3072),
    "head": (32768, 1024),
}
"""Outputs x inner of the medium model."""
EXPERTS, CHOSEN, HIDDEN, INNER = 32, 4, 1024, 512


def measure(quick: bool) -> list[Row]:
    """Every shape, or with quick two of them and fewer calls."""
    shapes = {name: SHAPES[name] for name in (("q_b", "o") if quick else SHAPES)}
    seconds = 0.05 if quick else 0.4
    with torch.inference_mode():
        bandwidth = max(read_bandwidth() for _ in range(1 if quick else 5))
        rows = [Row(target="3", what="read bandwidth of this machine", value=bandwidth / 1e9, unit="GB/s", goal="-", met=True)]
        for name, (outputs, inner) in shapes.items():
            weight = (torch.randn(outputs, inner) / inner**0.5).to(torch.bfloat16)
            rows += _decode_rows(name, weight, bandwidth, seconds)
            rows += _prefill_rows(name, weight, seconds)
        return rows + _expert_rows(bandwidth, seconds)


def _decode_rows(name: str, weight: Tensor, bandwidth: float, seconds: float) -> list[Row]:
    native, by_torch = NativeGemm(), Gemm()
    count = max(2, COLD_BYTES // weight.nbytes)
    packed, plain = [pack(weight) for _ in range(count)], [weight.clone() for _ in range(count)]
    wide = [_pack_fp32(weight) for _ in range(max(2, count // 2))]
    found = []
    for num_rows in DECODE_ROWS:
        x = torch.randn(num_rows, weight.shape[1])
        for kind, left, weights in (("bf16 x bf16", x.bfloat16(), packed), ("fp32 x bf16", x, packed), ("fp32 x fp32", x, wide)):
            rate = weights[0].panels.nbytes / _best(partial(native.linear, left), weights, seconds)
            peer, goal = None, SHARE_GOALS[num_rows] if kind == "bf16 x bf16" else None
            if goal is not None:
                peer = weight.nbytes / _best(partial(by_torch.linear, left), plain, seconds) / bandwidth * 100
            found.append(_row(f"{name} {kind}, {num_rows} rows", rate / bandwidth * 100, "% of read", goal, peer))
    return found


def _prefill_rows(name: str, weight: Tensor, seconds: float) -> list[Row]:
    native, by_torch, packed = NativeGemm(), Gemm(), pack(weight)
    found = []
    for num_rows in PREFILL_ROWS:
        x = torch.randn(num_rows, weight.shape[1])
        operations = 2 * num_rows * weight.numel()
        for dtype, left, plain in (("bf16", x.bfloat16(), weight), ("fp32", x, weight.float())):
            rate = operations / _best(partial(native.linear, left), [packed], seconds) / 1e9
            peer = operations / _best(partial(by_torch.linear, left), [plain], seconds) / 1e9
            found.append(_row(f"{name} {dtype} x bf16, {num_rows} rows", rate, "GFLOP/s", FLOP_GOALS[dtype], peer))
    return found


def _expert_rows(bandwidth: float, seconds: float) -> list[Row]:
    layers = 2 if seconds < 0.1 else 4
    stacks = [
        (pack(torch.randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16(), is_gated=True), pack(torch.randn(EXPERTS, HIDDEN, INNER).bfloat16()))
        for _ in range(layers)
    ]
    found = []
    for num_rows in (*DECODE_ROWS, *PREFILL_ROWS):
        chosen = torch.rand(num_rows, EXPERTS).topk(CHOSEN).indices.sort().values
        gates, hit = torch.rand(num_rows, CHOSEN), int(chosen.unique().numel())
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(num_rows, HIDDEN).to(dtype)
            call = _experts_call(x, chosen, gates)
            best_s = _best(call, stacks, seconds)
            name = f"experts {str(dtype).removeprefix('torch.')}, {num_rows} rows on {hit} experts"
            if num_rows in DECODE_ROWS:
                found.append(_row(name, hit * 3 * HIDDEN * INNER * 2 / best_s / bandwidth * 100, "% of read", None, None))
            else:
                found.append(_row(name, 6 * num_rows * CHOSEN * HIDDEN * INNER / best_s / 1e9, "GFLOP/s", None, None))
    return found


def _experts_call(x: Tensor, chosen: Tensor, gates: Tensor) -> Callable[[tuple[PackedMatrix, PackedMatrix]], Tensor]:
    gemm = NativeGemm()
    return lambda stack: moe_experts(x, chosen, gates, *stack, gemm=gemm, impl="native")


def _pack_fp32(weight: Tensor) -> PackedMatrix:
    """As weights that no bf16 holds are packed."""
    num_outputs, num_inner = weight.shape
    panels = empty_panels(1, num_outputs, num_inner, torch.float32)
    pack_into(panels[0], weight.float())
    return PackedMatrix(panels, num_outputs, num_inner)


def _row(what: str, value: float, unit: str, goal: float | None, peer: float | None) -> Row:
    return Row(
        target="3", what=what, value=value, unit=unit,
        goal="-" if goal is None else f">= {goal:g}", met=goal is None or value >= goal,
        peer=None if peer is None else "torch", peer_value=peer,
    )  # fmt: skip


def _best(call: Callable[[Operands], object], operands: Sequence[Operands], seconds: float) -> float:
    """Seconds of the fastest call within about `seconds`, operands in turn."""
    best_s, ends_s = float("inf"), time.perf_counter() + seconds
    for operand in cycle(operands):
        started_s = time.perf_counter()
        call(operand)
        best_s = min(best_s, time.perf_counter() - started_s)
        if started_s > ends_s:
            return best_s
    raise AssertionError("there is nothing to multiply with")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_benchmark("gemm", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
