"""Capacity against published and hand-checked numbers of GLM-5.3: parameters, bytes of weights, bytes per token, tokens held."""

import pytest

from cluster.planner.capacity import GPU_MEMORY_BYTES, Capacity, GpuGroup, Split, bytes_per_token, find_capacity, weight_bytes_per_gpu
from glm_runtime.config import GlmConfig
from glm_runtime.tensor_table import count_parameters, tensor_table
from glm_runtime.weight_scheme import WeightScheme, planned_tensors
from kv_transfer.layout import CacheComponent, CacheLayout
from tests.glm_checkpoints import GLM53_FIELDS, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GlmConfig:
    return GlmConfig.from_checkpoint(write_config(tmp_path_factory.mktemp("glm"), GLM53_FIELDS).parent)


def layout_of(config: GlmConfig, mla_bytes: int, index_bytes: int = 132) -> CacheLayout:
    return CacheLayout(
        64,
        (
            CacheComponent("mla", tuple(range(config.num_hidden_layers)), mla_bytes, "rows"),
            CacheComponent("index", config.indexing_layers, index_bytes, "keys"),
        ),
        "",
        "",
    )


def test_parameters(config: GlmConfig) -> None:
    counts = count_parameters(config)
    assert counts.target == 743_377_019_904
    assert counts.mtp == 9_952_920_576
    assert counts.total == 753_329_940_480
    assert round(counts.active / 1e9, 2) == 40.30
    assert round((counts.active - counts.head) / 1e9, 2) == 39.35


def test_bytes_of_the_fp8_build(config: GlmConfig) -> None:
    stored = {
        name: sum(tensor.num_bytes for tensor in planned_tensors(name, spec, WeightScheme.FP8, config))
        for name, spec in tensor_table(config).items()
    }
    mtp = sum(num_bytes for name, num_bytes in stored.items() if name.startswith("model.layers.78."))
    assert round(mtp / 1e9, 2) == 10.03
    assert round(sum(stored.values()) / 1e9, 2) == 755.62
    assert round((sum(stored.values()) - mtp) / 1e9, 2) == 745.58


@pytest.mark.parametrize(
    ("mla_bytes", "target", "with_mtp"), [(1152, 92_628, 93_912), (656, 53_940, 54_728), (576, 47_700, 48_408), (352, 30_228, 30_712)]
)
def test_bytes_per_token(config: GlmConfig, mla_bytes: int, target: int, with_mtp: int) -> None:
    layout = layout_of(config, mla_bytes)
    assert (bytes_per_token(layout), bytes_per_token(layout, 1)) == (target, with_mtp)
    assert layout.bytes_per_token == target


def capacity_of(
    config: GlmConfig, gpu: str, split: Split, scheme: WeightScheme = WeightScheme.FP8, num_gpus: int = 8, *, has_mtp: bool = True
) -> Capacity:
    """With an fp8_ds_mla cache."""
    weight_bytes = weight_bytes_per_gpu(config, scheme, split, num_gpus, has_mtp=has_mtp)
    group = GpuGroup(gpu=gpu, split=split, num_gpus=num_gpus)
    return find_capacity(layout_of(config, 656), group, weight_bytes, num_mtp_layers=int(has_mtp))


@pytest.mark.parametrize(("split", "million_tokens"), [(Split.TP, 0.50), (Split.DP, 2.0), (Split.DCP, 3.6)])
def test_tokens_on_eight_h200(config: GlmConfig, split: Split, million_tokens: float) -> None:
    """FP8 weights, fp8_ds_mla, 0.92 of 141 GB, 6 GB of workspace, with MTP, vocabulary split."""
    capacity = capacity_of(config, "H200", split)
    assert capacity.kv_tokens == pytest.approx(million_tokens * 1e6, rel=0.05)
    assert capacity.kv_tokens % 64 == 0
    assert capacity.weight_bytes + capacity.cache_bytes == capacity.group.usable_bytes


def test_the_weights_do_not_fit_eight_h100(config: GlmConfig) -> None:
    capacity = capacity_of(config, "H100", Split.TP)
    assert (capacity.fits, capacity.kv_tokens, capacity.cache_bytes) == (False, 0, 0)
    sixteen = capacity_of(config, "H100", Split.TP, num_gpus=16)
    assert sixteen.fits


@pytest.mark.parametrize("gpu", ["H200", "B200", "B300"])
def test_what_is_larger(config: GlmConfig, gpu: str) -> None:
    tokens = [capacity_of(config, gpu, split).kv_tokens for split in Split]
    assert tokens == sorted(tokens), "tp holds every token on every GPU; dcp spreads weights as well"
    assert capacity_of(config, gpu, Split.TP, has_mtp=False).kv_tokens > tokens[0]
    assert capacity_of(config, gpu, Split.TP, WeightScheme.NVFP4).kv_tokens > tokens[0]


def test_one_gpu_holds_every_weight_once_whatever_the_split(config: GlmConfig) -> None:
    one = {weight_bytes_per_gpu(config, WeightScheme.BF16, split, 1) for split in Split}
    table = tensor_table(config)
    assert one == {
        sum(tensor.num_bytes for name, spec in table.items() for tensor in planned_tensors(name, spec, WeightScheme.BF16, config))
    }


def test_heads_must_divide(config: GlmConfig) -> None:
    with pytest.raises(ValueError, match="64 attention heads cannot be split over 24 GPUs"):
        weight_bytes_per_gpu(config, WeightScheme.FP8, Split.TP, 24)


def test_gpus_are_in_order_of_memory() -> None:
    assert list(GPU_MEMORY_BYTES) == sorted(GPU_MEMORY_BYTES, key=lambda name: GPU_MEMORY_BYTES[name])
