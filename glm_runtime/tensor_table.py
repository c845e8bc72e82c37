"""The tensors of a `glm_moe_dsa` checkpoint: name, shape, and whether each may be quantised, from a `GlmConfig` alone."""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

from glm_runtime.config import GlmConfig
from glm_runtime.parallel.weight_cut import WeightCut
from glm_runtime.runtime_config import NumericsChoice


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a checkpoint must hold under one name. is_quantisable: may come quantised, with scales beside it (`weight_format.py`)."""

    shape: tuple[int, ...]
    is_quantisable: bool = False
    is_routed_expert: bool = False
    must_be_fp32: bool = False

    @property
    def num_elements(self) -> int:
        """Parameters of this tensor."""
        return math.prod(self.shape)


def tensor_table(config: GlmConfig) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must hold (scales excepted), the MTP layer's included."""
    table = dict(_global_tensors(config))
    for layer in range(config.num_hidden_layers):
        table.update(_layer_tensors(config, layer, config.is_indexing_layer(layer), config.is_moe_layer(layer)))
    for layer in config.mtp_layers:
        table.update(_layer_tensors(config, layer, has_indexer=True, is_moe=True))
        table.update(_mtp_tensors(config, layer))
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """active: what one token of the target model is multiplied with, head included; the embedding is only looked up."""

    target: int
    mtp: int
    active: int
    head: int

    @property
    def total(self) -> int:
        """All parameters of the checkpoint."""
        return self.target + self.mtp


def count_parameters(config: GlmConfig) -> ParameterCounts:
    """Parameters of the model that a configuration describes, from the tensor table."""
    table = tensor_table(config)
    mtp_prefixes = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
    mtp = sum(spec.num_elements for name, spec in table.items() if name.startswith(mtp_prefixes))
    total = sum(spec.num_elements for spec in table.values())
    routed = sum(spec.num_elements for name, spec in table.items() if spec.is_routed_expert and not name.startswith(mtp_prefixes))
    chosen = routed * config.num_experts_per_tok // config.n_routed_experts
    embedding = table["model.embed_tokens.weight"].num_elements
    return ParameterCounts(
        target=total - mtp, mtp=mtp, active=total - mtp - routed + chosen - embedding, head=table["lm_head.weight"].num_elements
    )


def loaded_weight_bytes(
    config: GlmConfig,
    numerics: NumericsChoice,
    narrow: Container[str] = (),
    *,
    with_mtp: bool = False,
    cut: WeightCut | None = None,
) -> int:
    """Memory that the weights take here, whatever format they are stored in: all are dequantised when they load.

    cut: the parts of a rank; None is everything. with_mtp: the MTP layer's too. narrow: tensors that stay bf16 although the runtime
    computes in fp32; for the compiled kernels, those stored so. Quantised ones whose values are exactly bf16 stay so too, which only
    loading can tell: with them it is an upper bound.
    """
    is_wide = numerics == "deterministic" or config.dtype == "float32"
    left_out = () if with_mtp else tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
    cut = cut or WeightCut()
    loaded = {
        name: cut.shape(name, spec.shape) for name, spec in tensor_table(config).items() if not name.startswith(left_out) and cut.has(name)
    }
    return sum(math.prod(shape) * (4 if is_wide and name not in narrow else 2) for name, shape in loaded.items())


def _global_tensors(config: GlmConfig) -> Iterator[tuple[str, TensorSpec]]:
    yield "model.embed_tokens.weight", TensorSpec((config.vocab_size, config.hidden_size))
    yield "model.norm.weight", TensorSpec((config.hidden_size,))
    yield "lm_head.weight", TensorSpec((config.vocab_size, config.hidden_size))


def _layer_tensors(config: GlmConfig, layer: int, has_indexer: bool, is_moe: bool) -> Iterator[tuple[str, TensorSpec]]:
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", TensorSpec((config.hidden_size,))
    yield prefix + "post_attention_layernorm.weight", TensorSpec((config.hidden_size,))
    yield from _attention_tensors(config, prefix + "self_attn.")
    if has_indexer:
        yield from _indexer_tensors(config, prefix + "self_attn.indexer.")
    if is_moe:
        yield from _moe_tensors(config, prefix + "mlp.")
    else:
        yield from _mlp_tensors(config, prefix + "mlp.", config.intermediate_size)


def _attention_tensors(config: GlmConfig, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    heads = config.num_attention_heads
    yield prefix + "q_a_proj.weight", TensorSpec((config.q_lora_rank, config.hidden_size), is_quantisable=True)
    yield prefix + "q_a_layernorm.weight", TensorSpec((config.q_lora_rank,))
    yield prefix + "q_b_proj.weight", TensorSpec((heads * config.qk_head_dim, config.q_lora_rank), is_quantisable=True)
    yield prefix + "kv_a_proj_with_mqa.weight", TensorSpec((config.latent_dim, config.hidden_size), is_quantisable=True)
    yield prefix + "kv_a_layernorm.weight", TensorSpec((config.kv_lora_rank,))
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    yield prefix + "kv_b_proj.weight", TensorSpec((heads * head_rows, config.kv_lora_rank), is_quantisable=True)
    yield prefix + "o_proj.weight", TensorSpec((config.hidden_size, heads * config.v_head_dim), is_quantisable=True)


def _indexer_tensors(config: GlmConfig, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    width = config.index_head_dim
    yield prefix + "wq_b.weight", TensorSpec((config.index_n_heads * width, config.q_lora_rank), is_quantisable=True)
    yield prefix + "wk.weight", TensorSpec((width, config.hidden_size), is_quantisable=True)
    yield prefix + "weights_proj.weight", TensorSpec((config.index_n_heads, config.hidden_size), is_quantisable=True)
    yield prefix + "k_norm.weight", TensorSpec((width,))
    yield prefix + "k_norm.bias", TensorSpec((width,))


def _mlp_tensors(config: GlmConfig, prefix: str, inner: int, is_routed_expert: bool = False) -> Iterator[tuple[str, TensorSpec]]:
    into, out_of = (inner, config.hidden_size), (config.hidden_size, inner)
    for name, shape in (("gate_proj", into), ("up_proj", into), ("down_proj", out_of)):
        yield f"{prefix}{name}.weight", TensorSpec(shape, is_quantisable=True, is_routed_expert=is_routed_expert)


def _moe_tensors(config: GlmConfig, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    yield prefix + "gate.weight", TensorSpec((config.n_routed_experts, config.hidden_size))
    # A bf16 bias would collapse near-equal scores, so a checkpoint that has one is refused.
    yield prefix + "gate.e_score_correction_bias", TensorSpec((config.n_routed_experts,), must_be_fp32=True)
    yield from _mlp_tensors(config, prefix + "shared_experts.", config.n_shared_experts * config.moe_intermediate_size)
    for expert in range(config.n_routed_experts):
        yield from _mlp_tensors(config, f"{prefix}experts.{expert}.", config.moe_intermediate_size, is_routed_expert=True)


def _mtp_tensors(config: GlmConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    prefix = f"model.layers.{layer}."
    yield prefix + "enorm.weight", TensorSpec((config.hidden_size,))
    yield prefix + "hnorm.weight", TensorSpec((config.hidden_size,))
    yield prefix + "shared_head.norm.weight", TensorSpec((config.hidden_size,))
    yield prefix + "eh_proj.weight", TensorSpec((config.hidden_size, 2 * config.hidden_size), is_quantisable=True)
