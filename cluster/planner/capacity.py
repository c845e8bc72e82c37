"""How many tokens of cache a group of GPUs holds beside the model's weights.

Knows: which weights each way of splitting the model keeps whole on every GPU, and what is left for blocks. Pure: configuration
and layout in, numbers out. Sizes of weights and caches come from the tables that loading and serving use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique

from glm_runtime.config import GlmConfig
from glm_runtime.tensor_table import TensorSpec, tensor_table
from glm_runtime.weight_format import DTYPE_BYTES
from glm_runtime.weight_scheme import WeightScheme, planned_tensors
from kv_transfer.layout import CacheLayout

GB = 1_000_000_000

GPU_MEMORY_BYTES: Mapping[str, int] = {"H100": 80 * GB, "H200": 141 * GB, "B200": 180 * GB, "B300": 288 * GB}
"""Memory of one GPU, as its vendor states it for eight-GPU systems."""


@unique
class Split(Enum):
    """How a group of W GPUs shares one model. Routed experts are spread over all of them in every one.

    tp: attention by heads, the cache whole on every GPU. dp: attention, shared expert and dense layers whole on every GPU, each GPU
    has its own requests and their cache. dcp: as tp, but each GPU has every W-th block of a request; queries of all heads are
    computed everywhere (q-replication), so what makes them is whole on every GPU.
    """

    TP = "TP"
    DP = "DP"
    DCP = "DCP"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuGroup:
    """GPUs that serve one copy of the model. usable_share: of memory; workspace_bytes: activations, buffers, graphs, per GPU."""

    gpu: str
    split: Split
    num_gpus: int = 8
    usable_share: float = 0.92
    workspace_bytes: int = 6 * GB

    @property
    def name(self) -> str:
        """As people write it: TP8."""
        return f"{self.split.value}{self.num_gpus}"

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that weights and cache may take."""
        return int(GPU_MEMORY_BYTES[self.gpu] * self.usable_share) - self.workspace_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """weight_bytes and cache_bytes: of one GPU; cache_bytes is 0 when the weights do not fit. kv_tokens: of the whole group."""

    group: GpuGroup
    weight_bytes: int
    cache_bytes: int
    kv_tokens: int

    @property
    def fits(self) -> bool:
        """Whether the model can be served at all."""
        return self.kv_tokens > 0


def bytes_per_token(layout: CacheLayout, num_mtp_layers: int = 0) -> int:
    """Cache bytes of one token; each MTP layer has one more MLA row and one more index key."""
    return sum(component.bytes_per_token * (len(component.layers) + num_mtp_layers) for component in layout.components)


def find_capacity(layout: CacheLayout, group: GpuGroup, weight_bytes: int, *, num_mtp_layers: int) -> Capacity:
    """What a group holds beside `weight_bytes` on each GPU (`weight_bytes_per_gpu`), in whole blocks."""
    cache_bytes = max(0, group.usable_bytes - weight_bytes)
    block_bytes = bytes_per_token(layout, num_mtp_layers) * layout.block_size_tokens
    num_holders = 1 if group.split is Split.TP else group.num_gpus
    kv_tokens = cache_bytes // block_bytes * layout.block_size_tokens * num_holders
    return Capacity(group=group, weight_bytes=weight_bytes, cache_bytes=cache_bytes, kv_tokens=kv_tokens)


def choose_num_gpus(config: GlmConfig, most: int = 8) -> int:
    """The largest power of two, at most `most`, that this model can be split over."""
    num_gpus = 1
    while 2 * num_gpus <= most and all(count % (2 * num_gpus) == 0 for _, count in _divided(config)):
        num_gpus *= 2
    return num_gpus


def _divided(config: GlmConfig) -> tuple[tuple[str, int], ...]:
    return ("attention heads", config.num_attention_heads), ("routed experts", config.n_routed_experts)


def weight_bytes_per_gpu(config: GlmConfig, scheme: WeightScheme, split: Split, num_gpus: int, *, has_mtp: bool = True) -> int:
    """Bytes of weights on each GPU, as runtimes hold them; the vocabulary is spread over the group.

    Raises ValueError when heads or experts do not divide.
    """
    for what, count in _divided(config):
        if count % num_gpus:
            raise ValueError(f"{count} {what} cannot be split over {num_gpus} GPUs")
    mtp_prefixes = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
    whole = shared_out = 0
    for name, spec in tensor_table(config).items():
        if name.startswith(mtp_prefixes) and not has_mtp:
            continue
        num_bytes = _held_bytes(config, name, spec, scheme)
        on_every_gpu = num_bytes * _replicated_share(config, name, spec, split)
        whole += round(on_every_gpu)
        shared_out += num_bytes - round(on_every_gpu)
    return whole + -(-shared_out // num_gpus)


def _held_bytes(config: GlmConfig, name: str, spec: TensorSpec, scheme: WeightScheme) -> int:
    """Bytes of one matrix in memory. Two are widened when loaded: kv_b is split by heads that cut scale blocks, wk is fused."""
    if name.endswith((".kv_b_proj.weight", ".indexer.wk.weight")):
        return spec.num_elements * DTYPE_BYTES["F32" if scheme is WeightScheme.FP32 else "BF16"]
    return sum(tensor.num_bytes for tensor in planned_tensors(name, spec, scheme, config))


def _replicated_share(config: GlmConfig, name: str, spec: TensorSpec, split: Split) -> float:
    """The share of a matrix that every GPU has; the rest is spread over the group."""
    if spec.is_routed_expert or name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0.0
    by_head_or_column = (".q_b_proj.", ".kv_b_proj.", ".o_proj.", ".gate_proj.", ".up_proj.", ".down_proj.")
    if split is Split.DP or not any(part in name for part in by_head_or_column):
        return 1.0
    if split is Split.DCP and ".q_b_proj." in name:
        return 1.0
    if split is Split.DCP and ".kv_b_proj." in name:  # the half that turns queries into latents
        return config.qk_nope_head_dim / (config.qk_nope_head_dim + config.v_head_dim)
    return 0.0
