"""Small random checkpoints on disk, with every tensor that the architecture has: what loader, model and oracle tests read."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.quantisation import quantise_block_fp8, quantise_nvfp4
from glm_runtime.stored_tensors import INDEX_FILE, WEIGHTS_FILE
from glm_runtime.synthetic import random_tensor
from glm_runtime.tensor_table import tensor_table
from glm_runtime.weight_format import (
    FP8_SCALE_SUFFIX,
    NVFP4_GLOBAL_SCALE_SUFFIX,
    NVFP4_INPUT_SCALE_SUFFIX,
    NVFP4_SCALE_SUFFIX,
    beside,
)

TINY = Path(__file__).parent.parent / "glm_runtime" / "tiny"

CACHE_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"cache_format": "fp32"},
    "bf16": {"cache_format": "bf16"},
    "bf16+fp8": {"cache_format": "bf16", "index_format": "fp8"},
    "fp8_e4m3": {"cache_format": "fp8_e4m3"},
    "fp8_ds_mla": {"cache_format": "fp8_ds_mla"},
    "fp8_ds_mla+ue8m0": {"cache_format": "fp8_ds_mla", "index_scale": "ue8m0"},
    "fp8_ds_mla+mxfp4": {"cache_format": "fp8_ds_mla", "index_format": "mxfp4"},
    "nvfp4_ds_mla": {"cache_format": "nvfp4_ds_mla"},
    "nvfp4_ds_mla+mxfp4": {"cache_format": "nvfp4_ds_mla", "index_format": "mxfp4"},
}
"""Fields of `RuntimeConfig` for every pair of cache formats that is worth telling apart; the shipped checkpoint takes them all."""

SMALL_FIELDS: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 193,
    "hidden_size": 96,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "head_dim": 192,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 24,
    "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full"],
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 4,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_nextn_predict_layers": 1,
    "eos_token_id": [3, 5, 7],
    "pad_token_id": 0,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""GLM's shape in small: dense and MoE layers, full and shared indexers, an MTP layer, widths that share no factor by chance."""

GROUPED_FIELDS: Mapping[str, Any] = {
    **SMALL_FIELDS,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "indexer_types": ["full", "shared", "full", "full", "shared"],
    "index_topk_freq": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "first_k_dense_replace": 1,
    "index_n_heads": 32,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
}
"""Expert groups, another sharing pattern, three heads, two shared experts."""
GROUPED_FIELDS = {name: value for name, value in GROUPED_FIELDS.items() if name not in ("index_topk_freq", "index_skip_topk_offset")}


CUTTABLE_FIELDS: Mapping[str, Any] = {**SMALL_FIELDS, "vocab_size": 196}
"""Sizes that two and four ranks divide."""
HEADS_OF_448_FIELDS: Mapping[str, Any] = {
    **CUTTABLE_FIELDS,
    "qk_nope_head_dim": 192,
    "qk_head_dim": 208,
    "v_head_dim": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""GLM-5.3's kv_b: the second head begins in the middle of a scale's 128 rows."""
FP8_CONFIG: Mapping[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4_CONFIG: Mapping[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
"""quantization_config of checkpoints that `quantise_tensors` and `nvfp4_tensors` pack."""

GLM53_FIELDS: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)],
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
"""config.json of GLM-5.3, by its public transcription."""


def write_checkpoint(
    directory: Path, fields: Mapping[str, Any] = SMALL_FIELDS, *, seed: int = 0, change: Callable[[dict[str, Tensor]], None] | None = None
) -> Path:
    """A random checkpoint in one safetensors file. `change` may edit the tensors before they are written."""
    write_config(directory, fields)
    tensors = random_tensors(GlmConfig.from_checkpoint(directory), seed)
    if change is not None:
        change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_quantised(
    directory: Path,
    fields: Mapping[str, Any],
    quantisation: Mapping[str, Any],
    pack: Callable[[GlmConfig, dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]],
) -> Path:
    """A random checkpoint whose matrices `pack` has quantised, in one safetensors file."""
    write_config(directory, {**fields, "quantization_config": quantisation})
    config = GlmConfig.from_checkpoint(directory)
    save_file(pack(config, random_tensors(config, seed=3))[0], directory / WEIGHTS_FILE)
    return directory


def write_config(directory: Path, fields: Mapping[str, Any]) -> Path:
    """config.json and a tokenizer.json that nothing reads but its digest."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "tokenizer.json").write_text("{}")
    return directory / "config.json"


def random_tensors(config: GlmConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in the config's dtype, as `glm-cluster make-checkpoint` draws them."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return {
        name: random_tensor(name, spec, seed).to(torch.float32 if spec.must_be_fp32 else dtype)
        for name, spec in tensor_table(config).items()
    }


def shard(directory: Path, num_shards: int = 3) -> None:
    """Split the single file as published checkpoints are."""
    tensors = load_file(directory / WEIGHTS_FILE)
    (directory / WEIGHTS_FILE).unlink()
    placed = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(sorted(tensors.items())[number::num_shards])
        save_file(part, directory / file)
        placed |= dict.fromkeys(part, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def quantise_tensors(config: GlmConfig, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A block-FP8 checkpoint of the same weights, and its twin whose matrices hold exactly what the FP8 ones stand for.

    weights_proj stays as it is, like the real checkpoints' (whose list of unquantised modules misspells it).
    """
    packed, twin = dict(tensors), dict(tensors)
    for name, spec in tensor_table(config).items():
        if spec.is_quantisable and "weights_proj" not in name:
            quantised, scales = quantise_block_fp8(tensors[name])
            packed[name], packed[beside(name, FP8_SCALE_SUFFIX)] = quantised, scales
            blocks = scales.repeat_interleave(FP8_BLOCK, 0)[: spec.shape[0]].repeat_interleave(FP8_BLOCK, 1)[:, : spec.shape[1]]
            twin[name] = quantised.float() * blocks
    return packed, twin


def nvfp4_tensors(config: GlmConfig, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint of the same weights with NVFP4 experts, and its twin whose experts hold exactly what the packed ones stand for."""
    packed, twin = dict(tensors), dict(tensors)
    for name, spec in tensor_table(config).items():
        if spec.is_routed_expert:
            data, scale, global_scale = quantise_nvfp4(tensors[name])
            packed[name], packed[beside(name, NVFP4_SCALE_SUFFIX)] = data, scale
            packed[beside(name, NVFP4_GLOBAL_SCALE_SUFFIX)] = global_scale
            packed[beside(name, NVFP4_INPUT_SCALE_SUFFIX)] = torch.tensor(0.5)
            twin[name] = unpack_nvfp4(data, scale, global_scale)
    return packed, twin


def unpack_nvfp4(data: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """The values, element by element from the format's definition, computed in fp64 and rounded once to fp32."""
    rows, half = data.shape
    values = torch.empty(rows, 2 * half, dtype=torch.float64)
    for odd in (0, 1):
        code = (data >> (4 * odd)) & 15
        exponent, mantissa = (code >> 1) & 3, code & 1
        magnitude = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1), mantissa / 2)
        values[:, odd::2] = torch.where(code >= 8, -magnitude, magnitude)
    return (values * scale.double().repeat_interleave(16, dim=1) * global_scale.double()).float()
