"""A block-FP8 checkpoint computes exactly what its dequantised twin computes: one fp32 weight, read in two ways."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm_runtime.config import GlmConfig
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from tests.conformance.glm_schedules import ScheduledRuntime, chunked
from tests.glm_checkpoints import SMALL_FIELDS, quantise_tensors, random_tensors, write_config

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

QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["model.layers.0.self_attn.indexers_proj"],
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("fp8")
    write_config(root / "packed", {**ODD_FIELDS, "quantization_config": QUANTISATION})
    write_config(root / "twin", ODD_FIELDS)
    config = GlmConfig.from_checkpoint(root / "packed")
    packed, twin = quantise_tensors(config, random_tensors(config, seed=3))
    save_file(packed, root / "packed" / "model.safetensors")
    save_file(twin, root / "twin" / "model.safetensors")
    return root / "packed", root / "twin"


def test_the_fp8_checkpoint_equals_its_dequantised_twin_bit_for_bit(twins: tuple[Path, Path]) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, ODD_FIELDS["vocab_size"], (90,), generator=generator).tolist()
    packed, twin = (
        ScheduledRuntime(GlmRuntime.load(RuntimeConfig(checkpoint=directory, cache_format="fp32", num_threads=1))).logits(
            [prompt], chunked(90, 32)
        )[0]
        for directory in twins
    )
    assert torch.equal(packed, twin)
    assert packed.isfinite().all()
