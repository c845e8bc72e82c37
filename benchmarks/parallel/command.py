"""The command line of this benchmark, and its rows."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.parallel.links import Link, speed_up
from benchmarks.parallel.rank_steps import time_steps
from benchmarks.parallel.step_plans import CONTEXT_TOKENS, NUM_DRAFTS, NUM_SEQUENCES, measure_plans
from benchmarks.report import Row, run_benchmark
from cluster.config import SHIPPED_CHECKPOINT
from cluster.planner.communication import StepRows, step_traffic
from glm_runtime.cache_format import CacheFormats
from glm_runtime.cache_layout import make_cache_layout
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.synthetic import write_config
from glm_runtime.synthetic_config import model_fields, token_fields
from glm_runtime.weight_scheme import WeightScheme

ROWS = StepRows(rows=(6,) * 32, num_scored=192, num_drawn=192, num_asking=32, num_drafted=160)
"""32 requests with 5 drafts each, contexts beyond index_topk, greedy."""
LAYOUTS = (
    ParallelLayout(tp_size=8),
    ParallelLayout(tp_size=8, is_expert_parallel=True),
    ParallelLayout(tp_size=8, dcp_size=8, is_expert_parallel=True),
    ParallelLayout(tp_size=8, dcp_size=8, is_expert_parallel=True, dcp_combine="ag_rs", replicates_queries=False),
)
ROWS_OF_ONE = StepRows(rows=(6,) * 4, num_scored=24, num_drawn=24, num_asking=4, num_drafted=20)
"""With data parallelism each of 8 workers has its share of the same requests."""
MEASURED = (
    ParallelLayout(),
    ParallelLayout(tp_size=2),
    ParallelLayout(tp_size=2, is_expert_parallel=True),
    ParallelLayout(tp_size=2, dcp_size=2),
    ParallelLayout(tp_size=2, dcp_size=2, dcp_combine="ag_rs", replicates_queries=False),
    ParallelLayout(pcp_size=2),
)
BANDWIDTHS = (25e9, 50e9, 100e9, 200e9, 450e9, 900e9)
LATENCIES = (2e-6, 5e-6, 10e-6, 20e-6)
DCP_SIZE = 8


def measure(quick: bool) -> list[Row]:
    """What GLM-5.3 exchanges by layout, what the shipped checkpoint's ranks take here, and links of all speeds."""
    config = glm53()
    return [*_exchanged(config), *_told(quick), *_measured(quick), *_links(config)]


def glm53() -> GlmConfig:
    """The real model's sizes."""
    fields = model_fields("glm-5.3", token_fields(SHIPPED_CHECKPOINT))
    with tempfile.TemporaryDirectory() as directory:
        return write_config(Path(directory) / "glm-5.3", fields, WeightScheme.FP8, SHIPPED_CHECKPOINT)


def _exchanged(config: GlmConfig) -> Iterator[Row]:
    formats = CacheFormats(main="fp8_ds_mla", index="fp8", index_scale="fp32", backend="flashmla_sparse")
    cache = make_cache_layout(config, formats, "", "")
    data_parallel = ParallelLayout(dp_size=8, is_expert_parallel=True)
    for layout, rows in (*((layout, ROWS) for layout in LAYOUTS), (data_parallel, ROWS_OF_ONE)):
        traffic = step_traffic(config, layout, rows, cache, item_bytes=2).values()
        what = f"GLM-5.3, 192 rows, {_name(layout)}"
        yield _row(f"{what}: sent by a rank in a step", sum(each.bytes_sent for each in traffic) / 1e6, "MB")
        yield _row(f"{what}: exchanges", sum(each.calls for each in traffic), "calls")


def _told(quick: bool) -> Iterator[Row]:
    num_steps = 50 if quick else 1000
    costs = measure_plans(num_steps)
    what = f"plan of a step, {NUM_SEQUENCES} requests x {1 + NUM_DRAFTS} rows at {CONTEXT_TOKENS:,} tokens"
    both_us = 1e6 * (costs.encode_s + costs.decode_s)
    yield Row(target="-", what=f"{what}: encode and decode", value=both_us, unit="us", goal="< 150", met=both_us < 150, repeats=num_steps)
    yield _row(f"{what}: told to another process and answered", 1e6 * costs.told_s, "us", num_steps)
    yield _row(f"{what}: size", costs.num_bytes / 1e3, "kB", num_steps)
    yield _row(f"{what}, all tables new: encode and decode", 1e6 * costs.first_s, "us")
    yield _row(f"{what}, all tables new: size", costs.first_bytes / 1e3, "kB")


def _measured(quick: bool) -> Iterator[Row]:
    num_steps = 5 if quick else 40
    for layout in MEASURED[:2] if quick else MEASURED:
        times = time_steps(layout, num_steps)
        what = f"shipped checkpoint, 24 rows and drafts, {_name(layout)} on {layout.num_ranks} processes over gloo"
        yield _row(f"{what}: a step", 1e3 * times.step_s, "ms", num_steps)
        if layout.num_ranks > 1:
            yield _row(f"{what}: share of it in exchanges, waiting included", 100 * times.exchange_share, "%", num_steps)
            yield _row(f"{what}: exchanges", times.calls, "calls", num_steps)
            yield _row(f"{what}: sent by rank 0", times.bytes_sent / 1e3, "kB", num_steps)


def _links(config: GlmConfig) -> Iterator[Row]:
    """How many times as long the alternative takes; below 1 it is the better one."""
    for num_rows in (6, 48, 192):
        for latency_s in LATENCIES:
            ratios = [speed_up(config, DCP_SIZE, num_rows, Link(latency_s=latency_s, bytes_per_s=each)) for each in BANDWIDTHS]
            at = " ".join(f"{each / 1e9:g}:{ratio:.2f}" for each, ratio in zip(BANDWIDTHS, ratios, strict=True))
            what = f"GLM-5.3, dcp{DCP_SIZE}, {num_rows} rows, {latency_s * 1e6:g} us an exchange"
            yield _row(f"{what}: ag_rs with gathered queries / a2a with replicated ones, by GB/s of a rank", at, "x")


def _name(layout: ParallelLayout) -> str:
    if layout.dcp_size == 1:
        return layout.describe()
    return f"{layout.describe()}, {layout.dcp_combine}, queries {'replicated' if layout.replicates_queries else 'gathered'}"


def _row(what: str, value: float | str, unit: str, repeats: int = 1) -> Row:
    return Row(target="-", what=what, value=value, unit=unit, goal="-", met=True, repeats=repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_benchmark("parallel", measure, arguments)
