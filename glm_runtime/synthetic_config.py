"""config.json of models with GLM-5.3's pattern in any size: leading dense layers, full and shared indexers, an MTP layer.

Knows: which fields follow from others. Does not know tensors (`synthetic.py`). Torch is not imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_runtime.config import CONFIG_FILE
from kv_transfer.errors import ConfigError

MODEL_SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "vocab_size": 2560,
        "hidden_size": 160,
        "intermediate_size": 320,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    },
    "medium": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 11,
        "num_attention_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
    "glm-5.3": {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 1048576,
        "rope_theta": 8000000.0,
    },
}
"""Starting points: as large as the shipped checkpoint, large enough to measure, and the real one."""

_COMMON: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-05,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def model_fields(size: str, tokens: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of config.json: a starting point, with `changes` by field name, and everything that follows from them.

    tokens: eos_token_id and pad_token_id. Layer schedules are not among the changes: they follow from num_hidden_layers,
    first_k_dense_replace, index_topk_freq and index_skip_topk_offset. Raises ConfigError for a change that is no starting field.
    """
    fields: dict[str, Any] = {**_COMMON, **MODEL_SIZES[size], **tokens}
    for name, value in (changes or {}).items():
        if name not in fields:
            raise ConfigError(f"is not a field that can be set; these can: {', '.join(sorted(fields))}", path=name)
        fields[name] = value
    layers, freq, offset = (int(fields[name]) for name in ("num_hidden_layers", "index_topk_freq", "index_skip_topk_offset"))
    dense = int(fields["first_k_dense_replace"])
    return {
        **{name: value for name, value in fields.items() if name != "rope_theta"},
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["rope_theta"]},
        "indexer_types": ["shared" if max(layer - offset + 1, 0) % max(freq, 1) else "full" for layer in range(layers)],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "num_key_value_heads": fields["num_attention_heads"],
        "qk_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
    }


def token_fields(tokenizer_dir: Path) -> dict[str, Any]:
    """End and padding tokens of the checkpoint that a tokenizer is taken from. Raises ConfigError."""
    path = tokenizer_dir / CONFIG_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {name: fields[name] for name in ("eos_token_id", "pad_token_id")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"names no eos_token_id and pad_token_id ({error})", path=str(path)) from None
