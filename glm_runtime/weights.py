"""A checkpoint's weights as the model uses them: fused, stacked, dequantised.

Knows which checkpoint tensors make one operand. Does not know how they are multiplied (`attention.py`, `indexer.py`, `moe.py`).
All tensors are contiguous and of the runtime's dtype, except what is fp32 always (router, norms, biases).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm_runtime.checkpoint import StoredTensor, check_tensors, stored_tensors
from glm_runtime.config import GlmConfig
from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.tensor_table import SCALE_SUFFIX
from kv_transfer.errors import ConfigError

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all) while weights load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """projections [Q + C + R, hidden] = [q_a; kv_a]; q_b [H * (N + R), Q]; key_up [H, N, C] and value_up [H, C, V] are kv_b by head."""

    projections: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerWeights:
    """queries [Hi * Di, Q]; key_and_weights [Di + Hi, hidden] = [wk; weights_proj]; k_norm weight and bias [Di] fp32."""

    queries: Tensor
    key_and_weights: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpWeights:
    """gate_up [2 I, hidden], gate rows first; down [hidden, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights:
    """router [E, hidden] and bias [E], fp32; gate_up [E, 2 I, hidden]; down [E, hidden, I]; the shared expert."""

    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared: MlpWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer; `indexer` is None where the layer shares an earlier list."""

    input_norm: Tensor
    post_attention_norm: Tensor
    attention: AttentionWeights
    indexer: IndexerWeights | None
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """embedding and head [vocabulary, hidden]; the layers in order; final_norm [hidden] fp32."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def load_weights(directory: Path, config: GlmConfig, dtype: torch.dtype, on_progress: LoadProgress | None = None) -> ModelWeights:
    """Read, dequantise and fuse the target model's weights; the MTP layer's tensors are checked but not read.

    Raises ConfigError as `check_checkpoint`, and naming the file when its bytes cannot be read.
    """
    stored = stored_tensors(directory)
    check_tensors(config, stored, directory)
    source = TensorSource(stored, config, dtype, on_progress)
    layers = tuple(_layer(source, config, layer) for layer in range(config.num_hidden_layers))
    return ModelWeights(
        embedding=source.matrix("model.embed_tokens.weight"),
        layers=layers,
        final_norm=source.fp32("model.norm.weight"),
        head=source.matrix("lm_head.weight"),
    )


class TensorSource:
    """Reads tensors by checkpoint name. A matrix with a scale beside it is dequantised; that decides, not a list in the config."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: GlmConfig, dtype: torch.dtype, on_progress: LoadProgress | None = None
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._on_progress = on_progress
        mtp_prefixes = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
        self._bytes_total = sum(t.header.num_bytes for name, t in stored.items() if not name.startswith(mtp_prefixes))
        self._bytes_read = 0

    def matrix(self, name: str) -> Tensor:
        """One weight in the runtime's dtype, new. Rounds: a dequantised product once, from fp32."""
        return self._wide(name).to(self._dtype).contiguous()

    def stack(self, *names: str) -> Tensor:
        """Weights one above the other, each dequantised by itself, so that no scale block spans two of them."""
        return torch.cat([self.matrix(name) for name in names])

    def fp32(self, name: str) -> Tensor:
        """One tensor in fp32, new."""
        return self._wide(name).float().contiguous()

    def _wide(self, name: str) -> Tensor:
        raw = self._read(name)
        scale_name = name.removesuffix(".weight") + SCALE_SUFFIX
        return dequantise(raw, self._read(scale_name)) if scale_name in self._stored else raw

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        try:
            with safe_open(stored.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name).clone()  # the mapped file may be unaligned, and may go away
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"tensor {name} cannot be read ({error})", path=str(stored.file)) from None
        self._bytes_read += stored.header.num_bytes
        if self._on_progress is not None:
            self._on_progress(self._bytes_read, self._bytes_total)
        return tensor


def dequantise(quantised: Tensor, scale: Tensor) -> Tensor:
    """w = q * scale of its 128 x 128 block. quantised: [N, K] e4m3; scale: [ceil(N / 128), ceil(K / 128)] fp32. Returns fp32, new."""
    num_rows, num_columns = quantised.shape
    row_scales = scale.repeat_interleave(FP8_BLOCK, dim=0)[:num_rows]
    return quantised.float() * row_scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :num_columns]


def gemm_shapes(weights: ModelWeights) -> set[tuple[int, int]]:
    """(K, N) of every product that the model forms with these weights, for the probe of `choose_gemm`."""
    shapes = {_product(weights.head)}
    for layer in weights.layers:
        attention = layer.attention
        matrices = [attention.projections, attention.q_b, attention.key_up[0].t(), attention.value_up[0].t(), attention.output]
        if layer.indexer is not None:
            matrices += [layer.indexer.queries, layer.indexer.key_and_weights]
        mlp = layer.mlp
        if isinstance(mlp, MoeWeights):
            matrices += [mlp.router, mlp.gate_up[0], mlp.down[0], mlp.shared.gate_up, mlp.shared.down]
        else:
            matrices += [mlp.gate_up, mlp.down]
        shapes.update(_product(matrix) for matrix in matrices)
    return shapes


def _product(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[1], matrix.shape[0]


def _layer(source: TensorSource, config: GlmConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    return LayerWeights(
        input_norm=source.fp32(prefix + "input_layernorm.weight"),
        post_attention_norm=source.fp32(prefix + "post_attention_layernorm.weight"),
        attention=_attention(source, config, prefix + "self_attn."),
        indexer=_indexer(source, prefix + "self_attn.indexer.") if config.is_indexing_layer(layer) else None,
        mlp=_moe(source, config, prefix + "mlp.") if config.is_moe_layer(layer) else _mlp(source, prefix + "mlp."),
    )


def _attention(source: TensorSource, config: GlmConfig, prefix: str) -> AttentionWeights:
    # Dequantised as a whole before it is split: a head's rows are not a multiple of the scale's 128.
    by_head = source.matrix(prefix + "kv_b_proj.weight").view(config.num_attention_heads, -1, config.kv_lora_rank)
    return AttentionWeights(
        projections=source.stack(prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"),
        q_norm=source.fp32(prefix + "q_a_layernorm.weight"),
        kv_norm=source.fp32(prefix + "kv_a_layernorm.weight"),
        q_b=source.matrix(prefix + "q_b_proj.weight"),
        key_up=by_head[:, : config.qk_nope_head_dim].contiguous(),
        value_up=by_head[:, config.qk_nope_head_dim :].transpose(1, 2).contiguous(),
        output=source.matrix(prefix + "o_proj.weight"),
    )


def _indexer(source: TensorSource, prefix: str) -> IndexerWeights:
    return IndexerWeights(
        queries=source.matrix(prefix + "wq_b.weight"),
        key_and_weights=source.stack(prefix + "wk.weight", prefix + "weights_proj.weight"),
        k_norm_weight=source.fp32(prefix + "k_norm.weight"),
        k_norm_bias=source.fp32(prefix + "k_norm.bias"),
    )


def _mlp(source: TensorSource, prefix: str) -> MlpWeights:
    gate_up = source.stack(prefix + "gate_proj.weight", prefix + "up_proj.weight")
    return MlpWeights(gate_up=gate_up, down=source.matrix(prefix + "down_proj.weight"))


def _moe(source: TensorSource, config: GlmConfig, prefix: str) -> MoeWeights:
    experts = [_mlp(source, f"{prefix}experts.{expert}.") for expert in range(config.n_routed_experts)]
    return MoeWeights(
        router=source.fp32(prefix + "gate.weight"),
        bias=source.fp32(prefix + "gate.e_score_correction_bias"),
        gate_up=torch.stack([expert.gate_up for expert in experts]),
        down=torch.stack([expert.down for expert in experts]),
        shared=_mlp(source, prefix + "shared_experts."),
    )
