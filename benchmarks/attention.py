"""Attention and the indexer at the shapes of the medium model: what they take of a decode step and of a prompt's token.

Decode lists lie in a pool far larger than the caches. Torch is timed on the same inputs with the same threads, and the results are
compared first. Minima of single calls: a busy machine makes them worse, never better.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import Row, run_benchmark
from glm_runtime.linear import Gemm
from glm_runtime.ops.cache_rows import store_rows
from glm_runtime.ops.dense_mla import dense_mla
from glm_runtime.ops.impl import Impl
from glm_runtime.ops.index_logits import index_logits
from glm_runtime.ops.select_topk import select_topk
from glm_runtime.ops.sparse_mla import sparse_mla
from glm_runtime.paged_cache import CacheRegion, PagedCache
from glm_runtime.row_format import RowKind, make_row_format
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.pool_memory import PoolMemory

LAYERS, INDEXING_LAYERS, HEADS, LATENT, ROPE, NOPE, VALUE = 11, 5, 16, 512, 64, 128, 128
INDEX_HEADS, INDEX_WIDTH, TOPK, CONTEXT, BATCH = 16, 128, 512, 1024, 16
SCALE = (NOPE + ROPE) ** -0.5
SPARSE_GOAL_MS = 15.0
"""All layers of a decode step of 16 rows, on two quiet cores."""
PREFILL_GOAL_MS = 0.5
"""A prompt's token, all layers."""
CLOSE = 5e-3
"""Relative RMS between the compiled form with bf16 products and torch in fp32."""

MLA_KINDS = (RowKind.BF16, RowKind.FP8_E4M3, RowKind.FP8_DS_MLA, RowKind.NVFP4_DS_MLA)
INDEX_KINDS = (RowKind.BF16, RowKind.INDEX_FP8_FP32, RowKind.INDEX_MXFP4)


def measure(quick: bool) -> list[Row]:
    """All formats, or with quick one of each and shorter prompts."""
    seconds = 0.1 if quick else 1.0
    with torch.inference_mode():
        rows = [row for kind in (MLA_KINDS[:1] if quick else MLA_KINDS) for row in _sparse_rows(kind, seconds)]
        rows += [row for kind in (INDEX_KINDS[:1] if quick else INDEX_KINDS) for row in _index_rows(kind, seconds)]
        return rows + [row for length in ((128,) if quick else (512, 2048)) for row in _prefill_rows(length, seconds)]


def _sparse_rows(kind: RowKind, seconds: float) -> list[Row]:
    region = _region(kind, LATENT + ROPE, BATCH * CONTEXT)
    lists = torch.stack([torch.randperm(CONTEXT)[:TOPK].sort().values + CONTEXT * row for row in range(BATCH)])
    queries, addresses = torch.randn(BATCH, HEADS, LATENT + ROPE), region.addresses(lists)

    def attend(rows: int, impl: Impl, uses_bf16: bool) -> Tensor:
        query = queries[:rows].bfloat16() if uses_bf16 else queries[:rows]
        return _attend(query, region, addresses[:rows], impl, uses_bf16)

    is_close = _relative_rms(attend(BATCH, "native", True), attend(BATCH, "cpu", False)) < CLOSE
    found = []
    for rows in (1, BATCH):
        peer = _best(partial(attend, rows, "cpu", False), seconds) * LAYERS * 1e3
        for mode, uses_bf16 in (("fast", True), ("deterministic", False)):
            value = _best(partial(attend, rows, "native", uses_bf16), seconds) * LAYERS * 1e3
            found.append(_row(f"sparse MLA, {kind.value}, {rows} rows, {LAYERS} layers, {mode}", value, SPARSE_GOAL_MS, peer, is_close))
    return found


def _index_rows(kind: RowKind, seconds: float) -> list[Row]:
    region = _region(kind, INDEX_WIDTH, BATCH * CONTEXT)
    queries, weights = torch.randn(BATCH, 1, INDEX_HEADS, INDEX_WIDTH).bfloat16(), torch.randn(BATCH, 1, INDEX_HEADS)
    tables, positions = torch.arange(BATCH * CONTEXT // 64).view(BATCH, -1), torch.full((BATCH, 1), CONTEXT - 1)
    visible = torch.full((BATCH,), CONTEXT)

    def score(impl: Impl) -> Tensor:
        return index_logits(queries, weights, region, tables, positions, gemm=Gemm(), impl=impl)

    scores = score("native")
    is_close = _relative_rms(scores, score("cpu")) < CLOSE
    best = torch.equal(select_topk(scores[:, 0], visible, TOPK, impl="native"), select_topk(scores[:, 0], visible, TOPK, impl="cpu"))
    impls: tuple[Impl, ...] = ("native", "cpu")
    timed = {impl: _best(partial(score, impl), seconds) * INDEXING_LAYERS * 1e3 for impl in impls}
    listed = {impl: _best(partial(select_topk, scores[:, 0], visible, TOPK, impl=impl), seconds) for impl in impls}
    what = f"{BATCH} rows, {INDEXING_LAYERS} layers"
    return [
        _row(f"index scores, {kind.value}, {what}", timed["native"], None, timed["cpu"], is_close),
        _row(f"top-k, {what}", listed["native"] * INDEXING_LAYERS * 1e3, None, listed["cpu"] * INDEXING_LAYERS * 1e3, best),
    ]


def _prefill_rows(length: int, seconds: float) -> list[Row]:
    """A whole prompt in one chunk: expanded, and absorbed over its lists."""
    queries = torch.randn(length, HEADS, NOPE + ROPE).bfloat16()
    rebuilt, shared = torch.randn(length, HEADS, NOPE + VALUE).bfloat16(), torch.randn(length, ROPE).bfloat16()
    lists = torch.full((length, TOPK), -1)
    for row in range(length):
        count = min(TOPK, row + 1)
        lists[row, :count] = torch.randperm(row + 1)[:count].sort().values
    masked = lists if length > TOPK else None

    def expand(impl: Impl) -> Tensor:
        return dense_mla(queries, rebuilt, shared, masked, start=0, scale=SCALE, scratch_bytes=2 << 20, impl=impl).float()

    region = _region(RowKind.BF16, LATENT + ROPE, length)
    absorbed, addresses = torch.randn(length, HEADS, LATENT + ROPE).bfloat16(), region.addresses(lists)

    def absorb() -> Tensor:
        return _attend(absorbed, region, addresses, "native", True)

    is_close = _relative_rms(expand("native"), expand("cpu")) < CLOSE
    a_token = LAYERS * 1e3 / length
    what = f"prompt of {length}, a token, {LAYERS} layers, fast"
    return [
        _row(f"expanded attention, {what}", _best(partial(expand, "native"), seconds) * a_token, PREFILL_GOAL_MS, None, is_close),
        _row(f"absorbed attention, {what}", _best(absorb, seconds) * a_token, None, None, True),
    ]


def _attend(queries: Tensor, region: CacheRegion, addresses: Tensor, impl: Impl, uses_bf16: bool) -> Tensor:
    options = {"latent_dim": LATENT, "scratch_bytes": 2 << 20}
    return sparse_mla(queries, region, addresses, **options, scale=SCALE, uses_bf16=uses_bf16, impl=impl)[0]


def _region(kind: RowKind, width: int, num_tokens: int) -> CacheRegion:
    """Random rows, stored by the format's own rule, in order."""
    component = CacheComponent("measured", (0,), make_row_format(kind, width).bytes_per_token, kind.value)
    layout = CacheLayout(64, (component,), "model", "tokenizer")
    memory = PoolMemory(-(-num_tokens // 64), layout.block_bytes)
    region = PagedCache(layout, memory.buffer, memory.num_blocks).region("measured", 0)
    store_rows(region, torch.arange(num_tokens), torch.randn(num_tokens, width))
    return region


def _row(what: str, value: float, goal: float | None, peer: float | None, is_right: bool) -> Row:
    """A wrong result is a missed row, however fast."""
    return Row(
        target="1-3", what=what, value=value, unit="ms",
        goal="equal to torch" if goal is None else f"<= {goal:g}", met=is_right and (goal is None or value <= goal),
        peer=None if peer is None else "torch", peer_value=peer,
    )  # fmt: skip


def _relative_rms(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).double().pow(2).mean().sqrt() / expected.double().pow(2).mean().sqrt())


def _best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call within about `seconds`."""
    best_s, ends_s = float("inf"), time.perf_counter() + seconds
    while True:
        started_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - started_s)
        if started_s > ends_s:
            return best_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_benchmark("attention", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
