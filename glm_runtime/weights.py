"""A checkpoint's weights as the model uses them: fused, stacked, dequantised.

Knows which checkpoint tensors make one operand. Does not know how they are multiplied (`attention.py`, `indexer.py`, `moe.py`).
For torch, operands are contiguous and of the runtime's dtype, except what is fp32 always (router, norms, biases). For the compiled
kernels they are packed, as bf16 where that loses nothing. One operand is made at a time, so that loading takes little more memory
than the model. Of several ranks each makes operands of its parts alone (`parallel/weight_cut.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.packed_matrix import Operand, StackPacker, pack
from glm_runtime.parallel.expert_balance import ExpertStacks
from glm_runtime.parallel.weight_cut import WeightCut
from glm_runtime.stored_tensors import StoredTensor, stored_tensors
from glm_runtime.tensor_check import check_tensors
from glm_runtime.tensor_reader import TensorReader
from glm_runtime.tensor_table import TensorSpec, tensor_table

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all) while weights load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """projections [Q + C + R, hidden] = [q_a; kv_a]; q_b [H * (N + R), Q]; key_up [H, N, C] and value_up [H, C, V] are kv_b by head,
    packed for `Products.heads` where they are packed. H are the rank's heads; of q_b and key_up there may be more (`WeightCut`)."""

    projections: Operand
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Operand
    key_up: Operand
    value_up: Operand
    output: Operand


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerWeights:
    """queries [Hi * Di, Q]; key_and_weights [Di + Hi, hidden] = [wk; weights_proj]; k_norm weight and bias [Di] fp32."""

    queries: Operand
    key_and_weights: Operand
    k_norm_weight: Tensor
    k_norm_bias: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpWeights:
    """gate_up [2 I, hidden], gate rows first; down [hidden, I]."""

    gate_up: Operand
    down: Operand


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights:
    """router [E, hidden] and bias [E], fp32, of all experts; the stacks of those that are here; the shared expert."""

    router: Operand
    bias: Tensor
    experts: ExpertStacks
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
class MtpWeights:
    """The MTP layer: projection [hidden, 2 hidden], embedding half first; its three norms [hidden] fp32; a full decoder layer."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Operand
    layer: LayerWeights
    final_norm: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """embedding and head [vocabulary, hidden], or the rank's rows of them; the layers in order; final_norm [hidden] fp32; mtp is None
    where it is not run.

    The embedding is only looked up: beside packed operands it stays bf16 where it is stored so, whatever the runtime's dtype.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Operand
    mtp: MtpWeights | None = None


def load_weights(
    directory: Path,
    config: GlmConfig,
    dtype: torch.dtype,
    on_progress: LoadProgress | None = None,
    *,
    is_packed: bool = False,
    with_mtp: bool = False,
    cut: WeightCut | None = None,
) -> ModelWeights:
    """Read, dequantise and fuse the weights; the MTP layer's tensors are always checked, and read only with_mtp.

    cut: the parts of a rank; None is everything. is_packed: for the compiled kernels. With dtype fp32 no value is rounded, and what is
    exactly bf16 is kept as that.
    Raises ConfigError as `check_checkpoint`, and naming the file when its bytes cannot be read.
    """
    stored = stored_tensors(directory)
    check_tensors(config, stored, directory)
    cut = cut or WeightCut()
    meter = _Meter(stored, config, cut, on_progress, with_mtp)
    with TensorReader(stored, meter.count) as reader:
        source = TensorSource(reader, tensor_table(config), dtype, cut, is_packed=is_packed)
        return ModelWeights(
            embedding=source.looked_up("model.embed_tokens.weight"),
            layers=tuple(
                _layer(source, config, layer, has_indexer=config.is_indexing_layer(layer), is_moe=config.is_moe_layer(layer))
                for layer in range(config.num_hidden_layers)
            ),
            final_norm=source.fp32("model.norm.weight"),
            head=source.operand("lm_head.weight"),
            mtp=_mtp(source, config) if with_mtp else None,
        )


class _Meter:
    """Counts the bytes of the tensors that a rank reads anything of, as they are read; what it skips of them counts as read."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: GlmConfig, cut: WeightCut, on_progress: LoadProgress | None, with_mtp: bool
    ) -> None:
        mtp_prefixes = () if with_mtp else tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
        self._bytes_total = sum(t.header.num_bytes for name, t in stored.items() if not name.startswith(mtp_prefixes) and cut.has(name))
        self._bytes_read = 0
        self._on_progress = on_progress

    def count(self, num_bytes: int) -> None:
        self._bytes_read += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._bytes_read, self._bytes_total)


class TensorSource:
    """Operands by the names of their checkpoint tensors, each in the runtime's dtype and new; of each tensor the part that `cut` says.

    Rounds: a dequantised product once, from fp32. Each tensor is dequantised by itself, and before it is cut: no scale block spans two of
    them, but a rank's part need not begin where one does.
    """

    def __init__(
        self, reader: TensorReader, table: Mapping[str, TensorSpec], dtype: torch.dtype, cut: WeightCut, *, is_packed: bool = False
    ) -> None:
        self.cut = cut
        self._reader = reader
        self._table = table
        self._dtype = dtype
        self._is_packed = is_packed

    def matrix(self, name: str) -> Tensor:
        """One weight as a tensor."""
        return self._wide(name).to(self._dtype)

    def looked_up(self, name: str) -> Tensor:
        """One weight whose rows are taken, not multiplied: beside packed operands as it is stored."""
        wide = self._wide(name)
        return wide if self._is_packed and wide.dtype == torch.bfloat16 else wide.to(self._dtype)

    def operand(self, *names: str, is_gated: bool = False) -> Operand:
        """Weights one above the other. is_gated: gate and up, for `Products.gated`."""
        if not self._is_packed:
            return self._stack(names)
        parts = [self._exact(name) for name in names]
        return pack(torch.cat(parts) if len(parts) > 1 else parts[0], is_gated=is_gated)

    def heads(self, plain: Tensor) -> Operand:
        """A weight by head, [H, K, N], for `Products.heads`."""
        return pack(plain.transpose(1, 2)) if self._is_packed else plain.contiguous()

    def operands(self, items: Sequence[Sequence[str]], *, is_gated: bool = False) -> Operand:
        """[items, rows, columns]: for each item its weights one above the other, as `operand`; all items have equal shapes."""
        if not self._is_packed:
            return self._stacks(items)
        packer = StackPacker(len(items), *self._shape(items[0]), is_gated=is_gated)
        for names in items:
            packer.add(torch.cat([self._exact(name) for name in names]))
        return packer.stack()

    def fp32(self, name: str) -> Tensor:
        """One tensor in fp32, whatever the runtime's dtype."""
        return self._wide(name).float()

    def fp32_operand(self, name: str) -> Operand:
        """One weight that is multiplied with fp32 rows and is not rounded, whatever the runtime's dtype."""
        return pack(self._wide(name)) if self._is_packed else self.fp32(name)

    def _stack(self, names: Sequence[str]) -> Tensor:
        return self._stacks([names])[0]

    def _stacks(self, items: Sequence[Sequence[str]]) -> Tensor:
        heights = [self._shape([name])[0] for name in items[0]]
        operand = torch.empty(len(items), *self._shape(items[0]), dtype=self._dtype)
        for item, names in zip(operand, items, strict=True):
            for rows, name in zip(item.split(heights), names, strict=True):
                rows.copy_(self._wide(name))
        return operand

    def _shape(self, names: Sequence[str]) -> tuple[int, int]:
        shapes = [self.cut.shape(name, self._table[name].shape) for name in names]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _exact(self, name: str) -> Tensor:
        """The weight in the runtime's dtype, except that what is stored as bf16 is not widened: packing would narrow it again."""
        wide = self._wide(name)
        return wide if wide.dtype == torch.bfloat16 else wide.to(self._dtype)

    def _wide(self, name: str) -> Tensor:
        spec = self._table[name]
        rows, columns = self.cut.parts(name)
        wide = self._reader.wide(name, spec, rows.of(spec.shape[0]))
        return wide if columns.size == 1 else wide[:, columns.of(spec.shape[1])].contiguous()


def gemm_shapes(weights: ModelWeights) -> set[tuple[int, int]]:
    """(K, N) of every product that the model forms with these plain weights, for the probe of `choose_gemm`."""
    shapes = {_product(weights.head)}
    if weights.mtp is not None:
        shapes.add(_product(weights.mtp.projection))
    for layer in (*weights.layers, *([weights.mtp.layer] if weights.mtp is not None else [])):
        attention, mlp = layer.attention, layer.mlp
        matrices = [attention.projections, attention.q_b, attention.output]
        if layer.indexer is not None:
            matrices += [layer.indexer.queries, layer.indexer.key_and_weights]
        if isinstance(mlp, MoeWeights):
            matrices += [mlp.router, mlp.experts.gate_up, mlp.experts.down, mlp.shared.gate_up, mlp.shared.down]
        else:
            matrices += [mlp.gate_up, mlp.down]
        shapes.update(_product(matrix) for matrix in matrices)
        shapes.update((stack.shape[1], stack.shape[2]) for stack in (attention.key_up, attention.value_up))
    return shapes


def _product(matrix: Operand) -> tuple[int, int]:
    """(K, N) of a matrix [N, K] or a stack of such."""
    return matrix.shape[-1], matrix.shape[-2]


def _mtp(source: TensorSource, config: GlmConfig) -> MtpWeights:
    (layer,) = config.mtp_layers
    prefix = f"model.layers.{layer}."
    return MtpWeights(
        embedding_norm=source.fp32(prefix + "enorm.weight"),
        hidden_norm=source.fp32(prefix + "hnorm.weight"),
        projection=source.operand(prefix + "eh_proj.weight"),
        layer=_layer(source, config, layer, has_indexer=True, is_moe=True),
        final_norm=source.fp32(prefix + "shared_head.norm.weight"),
    )


def _layer(source: TensorSource, config: GlmConfig, layer: int, *, has_indexer: bool, is_moe: bool) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    return LayerWeights(
        input_norm=source.fp32(prefix + "input_layernorm.weight"),
        post_attention_norm=source.fp32(prefix + "post_attention_layernorm.weight"),
        attention=_attention(source, config, prefix + "self_attn."),
        indexer=_indexer(source, prefix + "self_attn.indexer.") if has_indexer else None,
        mlp=_moe(source, config, prefix + "mlp.") if is_moe else _mlp(source, prefix + "mlp."),
    )


def _attention(source: TensorSource, config: GlmConfig, prefix: str) -> AttentionWeights:
    # Dequantised as a whole before it is split: a head's rows are not a multiple of the scale's 128.
    by_head = source.looked_up(prefix + "kv_b_proj.weight")
    by_head = by_head.view(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    own = source.cut.own_query_heads.of(by_head.shape[0])
    return AttentionWeights(
        projections=source.operand(prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"),
        q_norm=source.fp32(prefix + "q_a_layernorm.weight"),
        kv_norm=source.fp32(prefix + "kv_a_layernorm.weight"),
        q_b=source.operand(prefix + "q_b_proj.weight"),
        key_up=source.heads(by_head[:, : config.qk_nope_head_dim]),
        value_up=source.heads(by_head[own, config.qk_nope_head_dim :].transpose(1, 2)),
        output=source.operand(prefix + "o_proj.weight"),
    )


def _indexer(source: TensorSource, prefix: str) -> IndexerWeights:
    return IndexerWeights(
        queries=source.operand(prefix + "wq_b.weight"),
        key_and_weights=source.operand(prefix + "wk.weight", prefix + "weights_proj.weight"),
        k_norm_weight=source.fp32(prefix + "k_norm.weight"),
        k_norm_bias=source.fp32(prefix + "k_norm.bias"),
    )


def _mlp(source: TensorSource, prefix: str) -> MlpWeights:
    gate_up = source.operand(prefix + "gate_proj.weight", prefix + "up_proj.weight", is_gated=True)
    return MlpWeights(gate_up=gate_up, down=source.operand(prefix + "down_proj.weight"))


def _moe(source: TensorSource, config: GlmConfig, prefix: str) -> MoeWeights:
    numbers = range(config.n_routed_experts) if source.cut.experts is None else source.cut.experts
    experts = [f"{prefix}experts.{expert}." for expert in numbers]
    return MoeWeights(
        router=source.fp32_operand(prefix + "gate.weight"),
        bias=source.fp32(prefix + "gate.e_score_correction_bias"),
        experts=ExpertStacks(
            gate_up=source.operands([(expert + "gate_proj.weight", expert + "up_proj.weight") for expert in experts], is_gated=True),
            down=source.operands([(expert + "down_proj.weight",) for expert in experts]),
        ),
        shared=_mlp(source, prefix + "shared_experts."),
    )
