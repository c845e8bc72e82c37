"""Index groups: which layers, which buffers, one conversion each, and what a consumer may rely on."""

import dataclasses
from pathlib import Path

import pytest
import torch

from glm_runtime.config import GlmConfig
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.index_group import IndexGroup, build_index_groups, build_mtp_groups, form_groups
from glm_runtime.indexer import list_all_visible
from glm_runtime.ops.cache_rows import store_rows
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.step_batch import StepBatch
from kv_transfer.errors import ConfigError
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import GLM53_FIELDS, TINY, write_config
from tests.unit.glm_runtime.ops.pools import poisoned_region


@pytest.fixture(scope="module")
def config() -> GlmConfig:
    return GlmConfig.from_checkpoint(TINY)


def piece(name: str, tokens: list[int], start: int, blocks: list[int]) -> SequenceSlice:
    return SequenceSlice(sequence_id=SequenceId(name), tokens=tokens, start=start, block_table=[BlockId(block) for block in blocks])


def batch_of(config: GlmConfig, *pieces: SequenceSlice, row_tile: int = 1) -> StepBatch:
    return build_batch(StepPlan(step_number=1, slices=pieces), config, block_size_tokens=64, num_blocks=40, row_tile=row_tile)


def test_glm53_has_21_groups_and_an_mtp_group_of_its_own(tmp_path: Path) -> None:
    write_config(tmp_path, GLM53_FIELDS)
    config = GlmConfig.from_checkpoint(tmp_path)
    groups = build_index_groups(config)
    assert [group.layers for group in groups] == [(0,), (1,), *[(first, first + 1, first + 2, first + 3) for first in range(2, 75, 4)]]
    assert len(groups) == 21
    assert [group.layers for group in build_mtp_groups(config)] == [(78,)]


def test_groups_of_the_shipped_checkpoint(config: GlmConfig) -> None:
    groups = build_index_groups(config)
    assert [group.layers for group in groups] == [(0,), (1,), (2, 3, 4, 5), (6,)]
    assert [group.leader for group in groups] == [0, 1, 2, 6]
    assert tuple(group.layers for group in groups) == config.index_groups


def test_every_layer_is_in_one_group(config: GlmConfig) -> None:
    for schedule in (config.indexer_types[:1] * 7, config.indexer_types[:1] + config.indexer_types[3:4] * 6):
        groups = build_index_groups(dataclasses.replace(config, indexer_types=schedule))
        assert [layer for group in groups for layer in group.layers] == list(range(7))


def test_a_first_layer_that_shares_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layer 4 shares a list") as refused:
        form_groups((4, 5), lambda layer: layer == 5)
    assert refused.value.path == "indexer_types"


def test_a_config_whose_first_layer_shares_is_refused_by_name(tmp_path: Path) -> None:
    types = ["shared", *GLM53_FIELDS["indexer_types"][1:]]
    fields = {
        name: value for name, value in GLM53_FIELDS.items() if not name.startswith("index_topk_") and name != "index_skip_topk_offset"
    }
    write_config(tmp_path, {**fields, "indexer_types": types})
    with pytest.raises(ConfigError, match="indexer_types"):
        GlmConfig.from_checkpoint(tmp_path)


def test_lists_without_scores_hold_all_visible_tokens(config: GlmConfig) -> None:
    batch = batch_of(config, piece("a", [1, 2, 3], 0, [1]), row_tile=8)
    lists = torch.full((8, 64), 77)
    list_all_visible(batch, lists)
    assert [row[row >= 0].tolist() for row in lists] == [[0], [0, 1], [0, 1, 2], [], [], [], [], []]


def test_a_selection_is_where_the_listed_tokens_lie(config: GlmConfig) -> None:
    batch = batch_of(config, piece("a", [1], 10, [7]), piece("b", [1], 130, [4, 30, 9]))
    region = poisoned_region(24)
    slots = torch.tensor([7 * 64 + 3, 30 * 64 + 1, 9 * 64 + 2])
    store_rows(region, slots, torch.arange(3.0)[:, None].expand(3, 24))
    group = IndexGroup((0, 1), topk=8)
    lists = group.open(2, 2)
    lists.copy_(torch.tensor([[3, -1], [65, 130]]))
    selection = group.convert(lists, batch, region)
    assert selection.addresses[0, 1] == -1
    assert region.rows[selection.addresses[0, 0]].eq(0.0).all()
    assert region.rows[selection.addresses[1]].float().tolist() == [[1.0] * 24, [2.0] * 24]
    assert selection.counts.tolist() == [1, 2]


def test_one_conversion_serves_a_group(config: GlmConfig) -> None:
    runtime = GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1))
    memory = PoolMemory(8, runtime.layout.block_bytes)
    runner = runtime.attach(memory)
    for number, length in enumerate((70, 1, 1)):
        start = 0 if number == 0 else 69 + number
        runner.forward(StepPlan(step_number=number, slices=(piece("a", [5] * length, start, [1, 2]),)))
    assert [group.num_conversions for group in runtime.model.groups] == [3] * 4, "4 groups of 7 layers: 4 conversions a step"
    assert [group.generation for group in runtime.model.groups] == [3] * 4


def test_consumers_notice_lists_that_were_written_again(config: GlmConfig) -> None:
    batch, region, group = batch_of(config, piece("a", [1], 10, [7])), poisoned_region(24), IndexGroup((2, 3), topk=4)
    selection = group.convert(group.open(1, 4).fill_(-1), batch, region)
    selection.check(3, batch, region)
    group.open(1, 4)
    with pytest.raises(AssertionError, match="written again before layer 3"):
        selection.check(3, batch, region)


def test_consumers_notice_another_table_layer_or_stride(config: GlmConfig) -> None:
    batch, region, group = batch_of(config, piece("a", [1], 10, [7])), poisoned_region(24), IndexGroup((2, 3), topk=4)
    selection = group.convert(group.open(1, 4).fill_(-1), batch, region)
    with pytest.raises(AssertionError, match="layer 4 is not of the group"):
        selection.check(4, batch, region)
    with pytest.raises(AssertionError, match="other block tables"):
        selection.check(3, batch_of(config, piece("a", [1], 10, [7])), region)
    wider = poisoned_region(24, layers=3)
    with pytest.raises(AssertionError, match="its group's leader"):
        selection.check(3, batch, wider)
    with pytest.raises(AssertionError, match="other geometries"):
        group.check_regions([region, wider])
    with pytest.raises(AssertionError, match="not the group's own"):
        group.convert(torch.zeros(1, 4, dtype=torch.int64), batch, region)


def test_groups_do_not_share_buffers(config: GlmConfig) -> None:
    batch, region = batch_of(config, piece("a", [1], 10, [7])), poisoned_region(24)
    first, second = IndexGroup((0,), topk=4), IndexGroup((1,), topk=4)
    kept = first.convert(first.open(1, 4).fill_(3), batch, region)
    second.convert(second.open(1, 4).fill_(5), batch, region)
    assert kept.lists.tolist() == [[3] * 4]
    kept.check(0, batch, region)


def test_buffers_grow_up_to_the_step_limit_and_no_further() -> None:
    group = IndexGroup((0,), topk=8, max_rows=100)
    sizes = [group.open(rows, 8).untyped_storage().nbytes() // (8 * 8) for rows in (1, 17, 60, 100, 130, 5)]
    assert sizes == [16, 32, 64, 100, 130, 16], "a step above the limit gets a buffer that is not kept"
    assert group.open(3, 2).shape == (3, 2)


def test_drafts_reuse_the_list_of_each_requests_last_accepted_row(config: GlmConfig) -> None:
    region, group = poisoned_region(24), IndexGroup((7,), topk=4)
    verified = batch_of(config, piece("a", [1, 2, 3], 10, [7]), piece("b", [4, 5, 6], 70, [9, 2]))
    lists = group.open(6, 4)
    lists.copy_(torch.arange(24).view(6, 4))
    selection = group.convert(lists, verified, region)
    drafted = batch_of(config, piece("a", [8], 12, [7]), piece("b", [9], 73, [9, 2]))
    reused = group.compact(selection.lists, torch.tensor([1, 5]), drafted, region)
    assert reused.lists.tolist() == [[4, 5, 6, 7], [20, 21, 22, 23]]
    assert reused.addresses.tolist() == [region.addresses(7 * 64 + row).tolist() for row in (torch.arange(4, 8),)] + [
        region.addresses(9 * 64 + torch.arange(20, 24)).tolist()
    ]
    reused.check(7, drafted, region)
    with pytest.raises(AssertionError, match="written again"):
        selection.check(7, verified, region)
    with pytest.raises(AssertionError, match="1 lists for a step of 2 rows"):
        group.compact(reused.lists, torch.tensor([0]), drafted, region)
