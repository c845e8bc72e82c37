"""A block-FP8 or NVFP4 checkpoint computes exactly what its dequantised twin computes: one fp32 weight, read in two ways."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from tests.conformance.glm_schedules import ScheduledRuntime, chunked
from tests.glm_checkpoints import SMALL_FIELDS, nvfp4_tensors, quantise_tensors, random_tensors, shard, write_config

ODD_FIELDS = {
    **SMALL_FIELDS,
    "hidden_size": 160,
    "q_lora_rank": 136,
    "kv_lora_rank": 144,
    "qk_nope_head_dim": 100,
    "qk_head_dim": 116,
    "v_head_dim": 56,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
"""156 kv_b rows a head and 160 kv_a rows: no boundary is a multiple of the scale's 128, and the last blocks are partial."""
HEADS_OF_448_FIELDS = {
    **ODD_FIELDS,
    "qk_nope_head_dim": 192,
    "qk_head_dim": 208,
    "v_head_dim": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
"""GLM-5.3's kv_b: three and a half blocks of the scales a head, so that every second head begins in the middle of one."""

QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["model.layers.0.self_attn.indexers_proj"],
}


NVFP4_QUANTISATION = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.0*", "model.layers.7*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": 16, "num_bits": 4, "type": "float"}}},
}
"""As the published NVFP4 builds write it."""

Pack = Callable[[GlmConfig, dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture(
    scope="module",
    params=[
        (QUANTISATION, quantise_tensors, ODD_FIELDS),
        (QUANTISATION, quantise_tensors, HEADS_OF_448_FIELDS),
        (NVFP4_QUANTISATION, nvfp4_tensors, ODD_FIELDS),
    ],
    ids=["block-fp8", "block-fp8 with heads of 448 rows", "nvfp4"],
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    quantisation, pack, fields = request.param
    root = tmp_path_factory.mktemp("twins")
    write_config(root / "packed", {**fields, "quantization_config": quantisation})
    write_config(root / "twin", fields)
    config = GlmConfig.from_checkpoint(root / "packed")
    packed, twin = pack(config, random_tensors(config, seed=3))
    assert sum(not torch.equal(packed[name].float(), tensor) for name, tensor in twin.items() if name in packed) > 50
    save_file(packed, root / "packed" / "model.safetensors")
    save_file(twin, root / "twin" / "model.safetensors")
    return root / "packed", root / "twin"


def _logits(directory: Path) -> Tensor:
    prompt = torch.randint(0, ODD_FIELDS["vocab_size"], (90,), generator=torch.Generator().manual_seed(0)).tolist()
    runtime = GlmRuntime.load(RuntimeConfig(checkpoint=directory, cache_format="fp32", num_threads=1))
    return ScheduledRuntime(runtime).logits([prompt], chunked(90, 32))[0]


def test_a_quantised_checkpoint_equals_its_dequantised_twin_bit_for_bit(twins: tuple[Path, Path]) -> None:
    packed, twin = (_logits(directory) for directory in twins)
    assert torch.equal(packed, twin)
    assert packed.isfinite().all()


def test_so_does_one_in_two_shards(twins: tuple[Path, Path], tmp_path: Path) -> None:
    """Weights and scales of one matrix lie in different files here."""
    sharded = Path(shutil.copytree(twins[0], tmp_path / "sharded"))
    shard(sharded, 2)
    assert len(list(sharded.glob("model-*-of-00002.safetensors"))) == 2
    assert torch.equal(_logits(sharded), _logits(twins[1]))
