"""GlmConfig: what it reads, and which mistakes of a config.json it refuses by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.config import GlmConfig, IndexerType, MlpType
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import GLM53_FIELDS, SMALL_FIELDS, TINY, write_config

ABSENT = object()


def config_from(directory: Path, **changes: Any) -> GlmConfig:
    fields = {name: value for name, value in {**SMALL_FIELDS, **changes}.items() if value is not ABSENT}
    write_config(directory, fields)
    return GlmConfig.from_checkpoint(directory)


def test_the_shipped_checkpoint() -> None:
    config = GlmConfig.from_checkpoint(TINY)
    assert config.indexing_layers == (0, 1, 2, 6)
    assert config.moe_layers == (3, 4, 5, 6)
    assert config.mtp_layers == (7,)
    assert config.eos_token_ids == (2524, 2531, 2533)
    assert (config.latent_dim, config.qk_head_dim) == (576, 96)


def test_glm_5_3(tmp_path: Path) -> None:
    write_config(tmp_path, GLM53_FIELDS)
    config = GlmConfig.from_checkpoint(tmp_path)
    assert config.indexing_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(config.indexing_layers) == 21
    assert config.moe_layers == tuple(range(3, 78))
    assert config.qk_rope_head_dim == 64, "head_dim = 192 in the file must not become the rotary width"
    assert config.rope_theta == 8e6


def test_layer_schedules_without_the_lists(tmp_path: Path) -> None:
    config = config_from(tmp_path, indexer_types=ABSENT, mlp_layer_types=ABSENT)
    assert config.indexing_layers == (0, 1, 2, 6)
    assert config.moe_layers == (3, 4, 5, 6)


def test_the_pattern_comes_before_frequency_and_offset(tmp_path: Path) -> None:
    config = config_from(tmp_path, indexer_types=ABSENT, index_topk_freq=ABSENT, index_topk_pattern="FSSFFSS")
    assert config.indexing_layers == (0, 3, 4)


def test_absent_schedule_means_that_every_layer_indexes(tmp_path: Path) -> None:
    config = config_from(tmp_path, indexer_types=ABSENT, index_topk_freq=ABSENT, index_skip_topk_offset=ABSENT)
    assert config.indexing_layers == tuple(range(7))


def test_an_absent_interleave_flag_means_interleaved(tmp_path: Path) -> None:
    assert "indexer_rope_interleave" not in SMALL_FIELDS
    assert config_from(tmp_path).index_topk == SMALL_FIELDS["index_topk"]


def test_one_end_token_may_stand_alone(tmp_path: Path) -> None:
    assert config_from(tmp_path, eos_token_id=9).eos_token_ids == (9,)


def test_enums_are_not_strings(tmp_path: Path) -> None:
    config = config_from(tmp_path)
    assert config.indexer_types[3] is IndexerType.SHARED
    assert config.mlp_layer_types[0] is MlpType.DENSE


MISTAKES: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown-field", {"new_trick": 1}, "new_trick", "not a field this runtime knows"),
    ("missing-size", {"hidden_size": ABSENT}, "hidden_size", "is missing"),
    ("text-as-size", {"hidden_size": "96"}, "hidden_size", "expected a positive integer"),
    ("true-as-size", {"vocab_size": True}, "vocab_size", "expected a positive integer"),
    ("zero-size", {"index_topk": 0}, "index_topk", "expected a positive integer"),
    ("other-architecture", {"architectures": ["Glm5NextForConditionalGeneration"]}, "architectures", "GlmMoeDsaForCausalLM"),
    ("other-model-type", {"model_type": "deepseek_v32"}, "model_type", "glm_moe_dsa"),
    ("head-width", {"qk_head_dim": 64}, "qk_head_dim", "is 40"),
    ("kv-heads", {"num_key_value_heads": 2}, "num_key_value_heads", "num_attention_heads is 4"),
    ("half-split-indexer", {"indexer_rope_interleave": False}, "indexer_rope_interleave", "computes True only"),
    ("half-split-rope", {"rope_interleave": False}, "rope_interleave", "computes True only"),
    ("softmax-router", {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
    ("greedy-router", {"topk_method": "greedy"}, "topk_method", "noaux_tc"),
    ("gelu", {"hidden_act": "gelu"}, "hidden_act", "silu"),
    ("bias", {"attention_bias": True}, "attention_bias", "False"),
    ("flag-as-number", {"attention_bias": 0}, "attention_bias", "False"),
    ("tied", {"tie_word_embeddings": True}, "tie_word_embeddings", "False"),
    ("yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type", "default"),
    ("rope-extra", {"rope_parameters": {"rope_theta": 1e4, "factor": 4}}, "rope_parameters.factor", "not a field"),
    ("no-theta", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta", "positive number"),
    ("no-rope", {"rope_parameters": ABSENT}, "rope_parameters", "expected an object"),
    ("two-thetas", {"rope_theta": 5.0}, "rope_theta", "rope_parameters.rope_theta is 10000.0"),
    ("old-scaling", {"rope_scaling": {"type": "yarn"}}, "rope_scaling", "None only"),
    ("indexers-contradict", {"index_skip_topk_offset": 2}, "indexer_types", "for layer 2"),
    ("pattern-contradicts", {"index_topk_pattern": "FFFFFFF"}, "index_topk_pattern", "contradicts indexer_types"),
    ("pattern-letters", {"index_topk_pattern": "FXS"}, "index_topk_pattern", "letters F"),
    ("indexers-short", {"indexer_types": ["full"]}, "indexer_types", "num_hidden_layers is 7"),
    ("indexers-word", {"indexer_types": ["full"] * 6 + ["half"]}, "indexer_types", "'full' and 'shared'"),
    ("leading-shared", {"indexer_types": ["shared"] + ["full"] * 6, "index_topk_freq": ABSENT}, "indexer_types", "no earlier list"),
    ("mlp-contradicts", {"first_k_dense_replace": 2}, "mlp_layer_types", "contradicts"),
    ("mlp-freq", {"moe_layer_freq": 2}, "mlp_layer_types", "contradicts"),
    ("mlp-nothing", {"mlp_layer_types": ABSENT, "first_k_dense_replace": ABSENT}, "first_k_dense_replace", "is missing"),
    ("eos-outside", {"eos_token_id": [3, 193]}, "eos_token_id", "vocabulary has 193"),
    ("eos-missing", {"eos_token_id": ABSENT}, "eos_token_id", "expected a token id"),
    ("dtype", {"dtype": "float16"}, "dtype", "'bfloat16' or 'float32'"),
    ("groups-uneven", {"n_group": 3}, "n_group", "equal groups"),
    ("groups-too-many", {"topk_group": 2}, "topk_group", "more than n_group"),
    ("experts-too-many", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok", "have fewer"),
    ("odd-rope", {"qk_rope_head_dim": 15, "qk_head_dim": ABSENT}, "qk_rope_head_dim", "even width"),
    ("narrow-indexer", {"index_head_dim": 8}, "index_head_dim", "less than qk_rope_head_dim"),
    ("two-mtp-layers", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", "at most one"),
    ("layer-types", {"layer_types": ["full_attention"] * 7}, "layer_types", "indexed_attention"),
    ("int4", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method", "'fp8' only"),
    ("fp8-blocks", {"quantization_config": {"weight_block_size": [64, 64]}}, "quantization_config.weight_block_size", "[128, 128] only"),
    ("fp8-extra", {"quantization_config": {"scale_fmt": "ue8m0"}}, "quantization_config.scale_fmt", "not a field"),
]


@pytest.mark.parametrize(("changes", "field", "says"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_refused_by_file_and_field(tmp_path: Path, changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(tmp_path, **changes)
    assert caught.value.path == f"{tmp_path / 'config.json'}:{field}"
    assert says in caught.value.message


def test_a_quantisation_is_noticed(tmp_path: Path) -> None:
    assert config_from(tmp_path, quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["x"]}).is_quantised


@pytest.mark.parametrize(("content", "says"), [("{", "is not JSON"), ("[1]", "expected an object"), (None, "cannot be read")])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        GlmConfig.from_checkpoint(tmp_path)


def test_the_message_lists_all_unknown_fields(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a_thing, b_thing"):
        config_from(tmp_path, b_thing=1, a_thing=json.loads("null"))
