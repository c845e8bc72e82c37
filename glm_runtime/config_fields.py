"""Checks config.json field by field: types, contradictions, variants that are not computed here, unknown names.

Knows: what each field may say and which fields repeat each other. Does not know tensors. Every refusal is a ConfigError whose
path is `FILE:FIELD`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kv_transfer.errors import ConfigError

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"
FP8_BLOCK = 128

IGNORED_FIELDS: Mapping[str, str] = {
    "head_dim": "wrong in published configs (192); the rotary width is qk_rope_head_dim",
    "attention_dropout": "training only",
    "initializer_range": "training only",
    "output_router_logits": "training only",
    "router_aux_loss_coef": "training only",
    "pretraining_tp": "training only",
    "use_cache": "a cache is always used",
    "ep_size": "a property of the deployment, not of the model",
    "bos_token_id": "the chat template writes its own first tokens",
    "transformers_version": "provenance",
    "_name_or_path": "provenance",
    "auto_map": "no code is loaded from a checkpoint",
}
"""Fields that change nothing here, each with the reason. Anything else that no check reads is an error."""

FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "tie_word_embeddings": (False,),
    "moe_router_dtype": ("float32", None),
    "rope_scaling": (None,),
}
"""Fields with one computed value (the first is what an absent field means): another is a model that this runtime would get wrong."""

_QUANTISATIONS: Mapping[str, tuple[Mapping[str, Any], frozenset[str]]] = {
    "fp8": (
        {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
        frozenset({"modules_to_not_convert"}),
    ),
    "modelopt": (
        {"quant_algo": "NVFP4"},
        frozenset({"config_groups", "exclude_modules", "group_size", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer"}),
    ),
}
"""quant_method -> (fields with one readable value, fields that are not read). Lists of modules are misspelt in published
checkpoints, so the tensors decide; activations and cache are not quantised because a checkpoint says so."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)


class _Fields:
    """The raw fields of one file; remembers which were read so that the rest can be refused."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path
        self.seen: set[str] = set()

    def refuse(self, name: str, message: str) -> NoReturn:
        raise ConfigError(message, path=f"{self.path}:{name}")

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return self.raw.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            self.refuse(name, "is missing; expected a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, f"is {value!r}; expected a positive integer")
        return int(value)

    def count(self, name: str, default: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(name, f"is {value!r}; expected an integer that is not negative")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            self.refuse(name, "is missing; expected a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(name, f"is {value!r}; expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"is {value!r}; expected true or false")
        return value


def read_fields(path: Path) -> dict[str, Any]:
    """The constructor arguments of `GlmConfig`, with the two layer schedules still as strings.

    Raises ConfigError as `GlmConfig.from_checkpoint` says.
    """
    fields = _Fields(_read_json(path), path)
    _check_fixed(fields)
    sizes = {name: fields.size(name) for name in _SIZES}
    result: dict[str, Any] = {
        **sizes,
        "indexer_types": _indexer_types(fields, sizes["num_hidden_layers"]),
        "mlp_layer_types": _mlp_layer_types(fields, sizes["num_hidden_layers"]),
        "n_group": fields.size("n_group", 1),
        "topk_group": fields.size("topk_group", 1),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": _rope_theta(fields),
        "num_nextn_predict_layers": fields.count("num_nextn_predict_layers", 0),
        "index_share_for_mtp_iteration": fields.flag("index_share_for_mtp_iteration", False),
        "eos_token_ids": _eos_token_ids(fields, sizes["vocab_size"]),
        "pad_token_id": fields.get("pad_token_id"),
        "dtype": _dtype(fields),
        "is_quantised": _is_quantised(fields),
    }
    _check_shapes(fields, result)
    _refuse_unknown(fields)
    return result


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); a checkpoint directory needs it", path=str(path)) from None
    except ValueError as error:
        raise ConfigError(f"is not JSON ({error})", path=str(path)) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"holds a {type(raw).__name__}; expected an object with the model's fields", path=str(path))
    return raw


def _check_fixed(fields: _Fields) -> None:
    architectures = fields.get("architectures", [ARCHITECTURE])
    if architectures != [ARCHITECTURE]:
        fields.refuse("architectures", f"is {architectures!r}; this runtime computes {[ARCHITECTURE]!r} only")
    for name, allowed in FIXED_FIELDS.items():
        value = fields.get(name, allowed[0])
        if not any(value is option or (value == option and type(value) is type(option)) for option in allowed):
            fields.refuse(name, f"is {value!r}; this runtime computes {allowed[0]!r} only")


def _indexer_types(fields: _Fields, num_layers: int) -> list[str]:
    """`indexer_types` first, then the pattern, then frequency and offset; what is given more than once must agree."""
    given = fields.get("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if pattern is not None and given is None:
        given = _expand_pattern(fields, pattern)
    elif pattern is not None and _expand_pattern(fields, pattern) != given:
        fields.refuse("index_topk_pattern", "contradicts indexer_types")
    scheduled = _scheduled_indexers(fields, num_layers)
    if given is None:
        given = scheduled
    _check_schedule(fields, "indexer_types", given, ("full", "shared"), num_layers)
    if "index_topk_freq" in fields.raw and given != scheduled:
        layer = next(layer for layer in range(num_layers) if given[layer] != scheduled[layer])
        fields.refuse(
            "indexer_types",
            f"says {given[layer]!r} for layer {layer}, but index_topk_freq and index_skip_topk_offset say {scheduled[layer]!r}",
        )
    if given[0] != "full":
        fields.refuse("indexer_types", "starts with a shared layer, which has no earlier list to share")
    return list(given)


def _expand_pattern(fields: _Fields, pattern: object) -> list[str]:
    if isinstance(pattern, str):
        if set(pattern) - {"F", "S"}:
            fields.refuse("index_topk_pattern", f"is {pattern!r}; expected the letters F (full) and S (shared)")
        return ["full" if letter == "F" else "shared" for letter in pattern]
    if not isinstance(pattern, list):
        fields.refuse("index_topk_pattern", f"is {pattern!r}; expected a string of F and S, or a list")
    return pattern


def _scheduled_indexers(fields: _Fields, num_layers: int) -> list[str]:
    """shared(l) <=> max(l - offset + 1, 0) mod freq != 0. An absent offset is 2, as in the reference implementation."""
    freq = fields.size("index_topk_freq", 1)
    offset = fields.count("index_skip_topk_offset", 2)
    return ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(num_layers)]


def _mlp_layer_types(fields: _Fields, num_layers: int) -> list[str]:
    given = fields.get("mlp_layer_types")
    first_dense = fields.get("first_k_dense_replace")
    freq = fields.size("moe_layer_freq", 1)
    if first_dense is None and given is None:
        fields.refuse("first_k_dense_replace", "is missing, and so is mlp_layer_types; one of them must say which layers are dense")
    if first_dense is not None:
        first_dense = fields.count("first_k_dense_replace", 0)
        scheduled = ["sparse" if layer >= first_dense and layer % freq == 0 else "dense" for layer in range(num_layers)]
        given = scheduled if given is None else given
        _check_schedule(fields, "mlp_layer_types", given, ("dense", "sparse"), num_layers)
        if given != scheduled:
            fields.refuse("mlp_layer_types", f"contradicts first_k_dense_replace = {first_dense} and moe_layer_freq = {freq}")
    _check_schedule(fields, "mlp_layer_types", given, ("dense", "sparse"), num_layers)
    return list(given)


def _check_schedule(fields: _Fields, name: str, given: object, allowed: Sequence[str], num_layers: int) -> None:
    if not isinstance(given, list) or any(kind not in allowed for kind in given):
        fields.refuse(name, f"must be a list of {' and '.join(repr(kind) for kind in allowed)}")
    if len(given) != num_layers:
        fields.refuse(name, f"has {len(given)} entries; num_hidden_layers is {num_layers}")


def _rope_theta(fields: _Fields) -> float:
    parameters = fields.get("rope_parameters")
    if not isinstance(parameters, dict):
        fields.refuse("rope_parameters", f"is {parameters!r}; expected an object with rope_type and rope_theta")
    nested = _Fields(parameters, fields.path)
    kind = nested.get("rope_type", "default")
    if kind != "default":
        fields.refuse("rope_parameters.rope_type", f"is {kind!r}; this runtime computes 'default' only")
    theta = parameters.get("rope_theta")
    nested.seen.add("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        fields.refuse("rope_parameters.rope_theta", f"is {theta!r}; expected a positive number")
    if unknown := sorted(set(parameters) - nested.seen):
        fields.refuse(f"rope_parameters.{unknown[0]}", "is not a field this runtime knows")
    if (repeated := fields.get("rope_theta", theta)) != theta:
        fields.refuse("rope_theta", f"is {repeated!r} but rope_parameters.rope_theta is {theta!r}")
    return float(theta)


def _eos_token_ids(fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    given = fields.get("eos_token_id")
    ids = [given] if isinstance(given, int) else given
    if not isinstance(ids, list) or not ids:
        fields.refuse("eos_token_id", f"is {given!r}; expected a token id or a list of them")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            fields.refuse("eos_token_id", f"names token {token!r}; the vocabulary has {vocab_size}")
    return tuple(ids)


def _dtype(fields: _Fields) -> str:
    given = fields.get("dtype", fields.get("torch_dtype"))
    fields.get("torch_dtype")
    if given not in ("bfloat16", "float32"):
        fields.refuse("dtype", f"is {given!r}; expected 'bfloat16' or 'float32'")
    return str(given)


def _is_quantised(fields: _Fields) -> bool:
    quantisation = fields.get("quantization_config")
    if quantisation is None:
        return False
    if not isinstance(quantisation, dict):
        fields.refuse("quantization_config", f"is {quantisation!r}; expected an object")
    method = quantisation.get("quant_method", "fp8")
    if method not in _QUANTISATIONS:
        fields.refuse("quantization_config.quant_method", f"is {method!r}; this runtime reads 'modelopt' (NVFP4) and 'fp8' only")
    expected, ignored = _QUANTISATIONS[method]
    for name, value in expected.items():
        if quantisation.get(name, value) != value:
            fields.refuse(f"quantization_config.{name}", f"is {quantisation[name]!r}; this runtime reads {value!r} only")
    if unknown := sorted(set(quantisation) - set(expected) - ignored - {"quant_method"}):
        fields.refuse(f"quantization_config.{unknown[0]}", "is not a field this runtime knows")
    return True


def _check_shapes(fields: _Fields, result: Mapping[str, Any]) -> None:
    heads = result["num_attention_heads"]
    if (kv_heads := fields.get("num_key_value_heads", heads)) != heads:
        fields.refuse("num_key_value_heads", f"is {kv_heads!r}; MLA has one key head per query head, and num_attention_heads is {heads}")
    width = result["qk_nope_head_dim"] + result["qk_rope_head_dim"]
    if (given := fields.get("qk_head_dim", width)) != width:
        fields.refuse("qk_head_dim", f"is {given!r}, but qk_nope_head_dim + qk_rope_head_dim is {width}")
    if result["qk_rope_head_dim"] % 2:
        fields.refuse("qk_rope_head_dim", f"is {result['qk_rope_head_dim']}; rotary pairs need an even width")
    if result["index_head_dim"] < result["qk_rope_head_dim"]:
        fields.refuse("index_head_dim", f"is {result['index_head_dim']}, less than qk_rope_head_dim = {result['qk_rope_head_dim']}")
    if result["num_nextn_predict_layers"] > 1:
        fields.refuse("num_nextn_predict_layers", f"is {result['num_nextn_predict_layers']}; GLM has at most one")
    layer_types = fields.get("layer_types")
    if layer_types is not None and set(layer_types) != {"indexed_attention"}:
        fields.refuse("layer_types", f"is {layer_types!r}; this runtime computes 'indexed_attention' layers only")
    _check_experts(fields, result)


def _check_experts(fields: _Fields, result: Mapping[str, Any]) -> None:
    experts, groups, kept = result["n_routed_experts"], result["n_group"], result["topk_group"]
    if experts % groups or (groups > 1 and experts // groups < 2):
        fields.refuse("n_group", f"is {groups}; it must split {experts} experts into equal groups of at least two")
    if kept > groups:
        fields.refuse("topk_group", f"is {kept}, more than n_group = {groups}")
    if result["num_experts_per_tok"] > kept * (experts // groups):
        fields.refuse("num_experts_per_tok", f"is {result['num_experts_per_tok']}; {kept} groups of {experts // groups} experts have fewer")


def _refuse_unknown(fields: _Fields) -> None:
    unknown = sorted(set(fields.raw) - fields.seen - set(IGNORED_FIELDS))
    if unknown:
        fields.refuse(
            unknown[0],
            "is not a field this runtime knows, so it may change what the model computes. If it does not, add it to "
            f"glm_runtime.config_fields.IGNORED_FIELDS with the reason. All unknown fields: {', '.join(unknown)}",
        )
