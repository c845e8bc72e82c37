"""The communication ledger of GLM-5.3 against hand-checked numbers."""

import math

import pytest

from cluster.planner.communication import StepRows, Traffic, expected_copies, step_traffic
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from kv_transfer.layout import CacheComponent, CacheLayout
from tests.glm_checkpoints import GLM53_FIELDS, write_config

ROWS = StepRows(rows=(6,) * 32, num_scored=192)
SUMS = (GroupKind.TENSOR, Operation.ALL_REDUCE)
SHARES = GroupKind.DECODE_CONTEXT


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GlmConfig:
    return GlmConfig.from_checkpoint(write_config(tmp_path_factory.mktemp("glm"), GLM53_FIELDS).parent)


@pytest.fixture(scope="module")
def cache(config: GlmConfig) -> CacheLayout:
    mla = CacheComponent("mla_kv", tuple(range(config.num_hidden_layers)), 656, "rows")
    return CacheLayout(64, (mla, CacheComponent("index_k", config.indexing_layers, 132, "keys")), "", "")


def traffic(config: GlmConfig, layout: ParallelLayout, cache: CacheLayout) -> dict[tuple[GroupKind, Operation], Traffic]:
    return dict(step_traffic(config, layout, ROWS, cache, item_bytes=2))


def test_eight_tensor_ranks_sum_156_times_and_the_embedding(config: GlmConfig, cache: CacheLayout) -> None:
    found = traffic(config, ParallelLayout(tp_size=8), cache)
    assert found[SUMS].calls == 157
    assert found[SUMS].bytes_sent == 157 * 192 * 12_288 * 1.75
    assert round(found[SUMS].bytes_sent / 1e9, 3) == 0.648
    whole = traffic(config, ParallelLayout(tp_size=8, replicates_embedding=True), cache)
    assert whole[SUMS].calls == 156
    assert found.keys() == {SUMS}, "replicated rows need no exchange of rows, with experts spread or not"
    assert traffic(config, ParallelLayout(tp_size=8, is_expert_parallel=True), cache) == found


def test_one_all_to_all_a_layer_carries_outputs_and_log_sums(config: GlmConfig, cache: CacheLayout) -> None:
    found = traffic(config, ParallelLayout(tp_size=8, dcp_size=8), cache)
    assert found[SHARES, Operation.ALL_TO_ALL] == Traffic(78, 78 * 7 * 192 * 8 * (512 + 2) * 2)
    assert found[SHARES, Operation.ALL_GATHER] == Traffic(21, 21 * 7 * 192 * 2048 * 8), "only indexing layers, and no queries"
    other = traffic(config, ParallelLayout(tp_size=8, dcp_size=8, dcp_combine="ag_rs", replicates_queries=False), cache)
    assert other[SHARES, Operation.REDUCE_SCATTER] == Traffic(78, 78 * 7 * 192 * 8 * 512 * 2)
    assert other[SHARES, Operation.ALL_GATHER].calls == 21 + 78 + 78


def test_a_row_goes_to_a_rank_at_most_once(config: GlmConfig, cache: CacheLayout) -> None:
    assert math.isclose(expected_copies(config, 256), 8 * 255 / 256)
    assert 4.5 < expected_copies(config, 8) < 5.5 < 7
    found = traffic(config, ParallelLayout(dp_size=8, is_expert_parallel=True), cache)
    assert found[GroupKind.WORLD, Operation.ALL_TO_ALL].calls == 3 * 75
    assert SUMS not in found


def test_prefill_ranks_exchange_keys_in_the_cache_s_format(config: GlmConfig, cache: CacheLayout) -> None:
    rows = StepRows(rows=(4096,))
    found = step_traffic(config, ParallelLayout(pcp_size=4), rows, cache, item_bytes=2)
    keys = 78 * 656 + 21 * 132
    assert found[GroupKind.PREFILL_CONTEXT, Operation.ALL_GATHER] == Traffic(79, 3 * 1024 * (keys + 2 * 6144))
