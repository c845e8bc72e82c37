"""Every rank's parts put together are the weights of one rank, bit by bit, whatever format they are stored in."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.packed_matrix import PackedMatrix, plain
from glm_runtime.parallel.expert import ExpertPlacement
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.weight_cut import Part, WeightCut, cut_weights
from glm_runtime.tensor_table import loaded_weight_bytes, tensor_table
from glm_runtime.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights, load_weights
from tests.glm_checkpoints import (
    CUTTABLE_FIELDS,
    FP8_CONFIG,
    GLM53_FIELDS,
    HEADS_OF_448_FIELDS,
    NVFP4_CONFIG,
    nvfp4_tensors,
    quantise_tensors,
    write_checkpoint,
    write_config,
    write_quantised,
)

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "fp32": lambda directory: write_checkpoint(directory, CUTTABLE_FIELDS),
    "bf16": lambda directory: write_checkpoint(directory, {**CUTTABLE_FIELDS, "dtype": "bfloat16"}),
    "block-fp8 with heads of 448 rows": lambda directory: write_quantised(directory, HEADS_OF_448_FIELDS, FP8_CONFIG, quantise_tensors),
    "nvfp4": lambda directory: write_quantised(directory, CUTTABLE_FIELDS, NVFP4_CONFIG, nvfp4_tensors),
}


@pytest.fixture(scope="module", params=WRITERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("cut"))


def load(directory: Path, cut: WeightCut | None = None, *, is_packed: bool = False) -> ModelWeights:
    config = GlmConfig.from_checkpoint(directory)
    return load_weights(directory, config, torch.float32, is_packed=is_packed, with_mtp=True, cut=cut)


def cuts(layout: ParallelLayout, num_experts: int) -> list[WeightCut]:
    slots = ExpertPlacement.even(num_experts, layout.ep_size).slots if layout.ep_size > 1 else [None] * layout.num_ranks
    return [cut_weights(layout, rank, slots[rank]) for rank in range(layout.num_ranks)]


def joined(parts: list[Any], dim: int) -> Tensor:
    return torch.cat([plain(part) for part in parts], dim=dim)


def gates_and_ups(parts: list[Any], dim: int) -> Tensor:
    """[2 I, hidden] (or a stack of such) of all ranks: gate rows first, each rank's inner columns in order."""
    halves = [plain(part).chunk(2, dim=dim) for part in parts]
    return torch.cat([torch.cat([half[number] for half in halves], dim=dim) for number in (0, 1)], dim=dim)


def assert_mlp(parts: list[MlpWeights], whole: MlpWeights) -> None:
    assert torch.equal(gates_and_ups([part.gate_up for part in parts], 0), plain(whole.gate_up))
    assert torch.equal(joined([part.down for part in parts], 1), plain(whole.down))


def assert_layer(parts: list[LayerWeights], whole: LayerWeights, *, is_expert_parallel: bool) -> None:
    attention = [part.attention for part in parts]
    assert torch.equal(joined([each.q_b for each in attention], 0), plain(whole.attention.q_b))
    assert torch.equal(joined([each.key_up for each in attention], 0), plain(whole.attention.key_up))
    assert torch.equal(joined([each.value_up for each in attention], 0), plain(whole.attention.value_up))
    assert torch.equal(joined([each.output for each in attention], 1), plain(whole.attention.output))
    assert all(torch.equal(plain(each.projections), plain(whole.attention.projections)) for each in attention)
    assert all((part.indexer is None) == (whole.indexer is None) for part in parts)
    if not isinstance(whole.mlp, MoeWeights):
        assert_mlp([part.mlp for part in parts], whole.mlp)  # type: ignore[misc]
        return
    experts: list[MoeWeights] = [part.mlp for part in parts]  # type: ignore[misc]
    assert_mlp([each.shared for each in experts], whole.mlp.shared)
    assert all(torch.equal(plain(each.router), plain(whole.mlp.router)) for each in experts)
    if is_expert_parallel:
        assert torch.equal(joined([each.experts.gate_up for each in experts], 0), plain(whole.mlp.experts.gate_up))
        assert torch.equal(joined([each.experts.down for each in experts], 0), plain(whole.mlp.experts.down))
    else:
        assert torch.equal(gates_and_ups([each.experts.gate_up for each in experts], 1), plain(whole.mlp.experts.gate_up))
        assert torch.equal(joined([each.experts.down for each in experts], 2), plain(whole.mlp.experts.down))


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp_size=2), ParallelLayout(tp_size=2, is_expert_parallel=True)], ids=lambda layout: layout.describe()
)
def test_the_parts_of_all_ranks_are_the_whole(directory: Path, layout: ParallelLayout, is_packed: bool) -> None:
    whole = load(directory, is_packed=is_packed)
    ranks = [load(directory, cut, is_packed=is_packed) for cut in cuts(layout, CUTTABLE_FIELDS["n_routed_experts"])]
    assert torch.equal(joined([rank.embedding for rank in ranks], 0), whole.embedding)
    assert torch.equal(joined([rank.head for rank in ranks], 0), plain(whole.head))
    assert whole.mtp is not None
    layers = [*whole.layers, whole.mtp.layer]
    for number, layer in enumerate(layers):
        parts = [[*rank.layers, rank.mtp.layer][number] for rank in ranks if rank.mtp is not None]
        assert_layer(parts, layer, is_expert_parallel=layout.is_expert_parallel)


def test_a_rank_counts_the_bytes_of_what_it_reads_anything_of(directory: Path) -> None:
    """Experts of other ranks are not read at all: they are in neither number."""
    config = GlmConfig.from_checkpoint(directory)
    totals = []
    for cut in (None, *cuts(ParallelLayout(tp_size=2, is_expert_parallel=True), 8)):
        reports: list[tuple[int, int]] = []
        load_weights(directory, config, torch.float32, lambda done, total, reports=reports: reports.append((done, total)), cut=cut)
        assert reports[-1][0] == reports[-1][1]
        totals.append(reports[-1][1])
    whole, first, second = totals
    assert first == second
    experts = sum(spec.num_elements for spec in tensor_table(config).values() if spec.is_routed_expert)
    assert whole - first > 0.2 * experts, "half of the experts, at half a byte each at least"


def test_a_decode_context_group_has_the_queries_of_all_its_heads() -> None:
    layout = ParallelLayout(tp_size=4, dcp_size=2)
    assert [cut_weights(layout, rank).query_heads for rank in range(4)] == [Part(0, 2), Part(0, 2), Part(1, 2), Part(1, 2)]
    assert [cut_weights(layout, rank).own_query_heads for rank in range(4)] == [Part(0, 2), Part(1, 2), Part(0, 2), Part(1, 2)]
    alone = dataclasses.replace(layout, replicates_queries=False)
    assert [cut_weights(alone, rank).query_heads for rank in range(4)] == [Part(rank, 4) for rank in range(4)]
    assert {cut_weights(alone, rank).own_query_heads for rank in range(4)} == {Part(0, 1)}


def test_replicated_queries_come_with_the_rows_of_their_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CUTTABLE_FIELDS)
    whole = load(tmp_path).layers[0].attention
    for rank in range(4):
        own = load(tmp_path, cut_weights(ParallelLayout(tp_size=4, dcp_size=2), rank)).layers[0].attention
        heads, group = slice(rank, rank + 1), slice(rank // 2 * 2, rank // 2 * 2 + 2)
        assert torch.equal(plain(own.key_up), plain(whole.key_up)[group])
        assert torch.equal(plain(own.value_up), plain(whole.value_up)[heads])
        assert torch.equal(plain(own.q_b), plain(whole.q_b).view(4, 40, -1)[group].flatten(0, 1))
        assert torch.equal(plain(own.output), plain(whole.output).view(-1, 4, 20)[:, rank])


def test_a_replicated_embedding_is_whole_everywhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CUTTABLE_FIELDS)
    layout = ParallelLayout(tp_size=2, replicates_embedding=True)
    for rank in range(2):
        weights = load(tmp_path, cut_weights(layout, rank))
        assert weights.embedding.shape[0] == 196
        assert plain(weights.head).shape[0] == 98


def test_packed_operands_stay_gated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CUTTABLE_FIELDS)
    mlp = load(tmp_path, cut_weights(ParallelLayout(tp_size=2), 1), is_packed=True).layers[0].mlp
    assert isinstance(mlp, MlpWeights)
    assert isinstance(mlp.gate_up, PackedMatrix)
    assert mlp.gate_up.is_gated
    assert mlp.gate_up.shape == (80, 96)


def test_bytes_of_a_rank_of_glm53(tmp_path: Path) -> None:
    """Eight ranks, with experts cut or spread: an eighth of everything but what is replicated. bf16."""
    write_config(tmp_path, GLM53_FIELDS)
    config = GlmConfig.from_checkpoint(tmp_path)
    table = tensor_table(config)
    replicated = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "norm.weight", "norm.bias", "gate.weight", "bias", "eh_proj.weight")
    kept = sum(spec.num_elements for name, spec in table.items() if name.endswith(replicated) or ".indexer." in name)
    total = sum(spec.num_elements for spec in table.values())
    for is_expert_parallel in (False, True):
        cut = cuts(ParallelLayout(tp_size=8, is_expert_parallel=is_expert_parallel), 256)[3]
        assert loaded_weight_bytes(config, "fast", with_mtp=True, cut=cut) == 2 * (kept + (total - kept) // 8)
