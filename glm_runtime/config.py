"""The model's dimensions and schedules, read from a checkpoint's config.json.

Knows: every number of the architecture, which layers own an indexer, which are MoE, the end tokens. Does not know: how a field
is checked (`config_fields.py`), which tensors lie in the checkpoint (`checkpoint.py`), or how a rank is run (`runtime_config.py`).
"""

from dataclasses import dataclass
from enum import Enum, unique
from functools import cached_property
from pathlib import Path
from typing import Literal

from glm_runtime.config_fields import read_fields
from kv_transfer.errors import ConfigError

CONFIG_FILE = "config.json"


@unique
class IndexerType(Enum):
    """Whether a layer scores tokens itself or reads the list of the nearest earlier layer that does."""

    FULL = "full"
    SHARED = "shared"


@unique
class MlpType(Enum):
    """Whether a layer's feed-forward part is one gated MLP or routed experts with a shared one."""

    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, kw_only=True)
class GlmConfig:
    """One GLM checkpoint of architecture `glm_moe_dsa`; names are those of config.json.

    `head_dim` of the file is not here on purpose: published configs carry 192 where the rotary part is 64 wide.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    mlp_layer_types: tuple[MlpType, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    index_share_for_mtp_iteration: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: Literal["bfloat16", "float32"]
    is_quantised: bool
    """Whether the file describes a quantisation. Which matrices are quantised, and how, the tensors themselves say."""

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "GlmConfig":
        """Read `directory`/config.json.

        Raises ConfigError, naming file and field, for a missing or unreadable file, a missing, ill-typed or unknown field, two
        fields that contradict each other, and a variant of the architecture that this runtime does not compute.
        """
        path = Path(directory) / CONFIG_FILE
        fields = read_fields(path)
        try:
            fields["indexer_types"] = tuple(IndexerType(kind) for kind in fields["indexer_types"])
            fields["mlp_layer_types"] = tuple(MlpType(kind) for kind in fields["mlp_layer_types"])
        except ValueError as error:
            raise ConfigError(str(error), path=str(path)) from None
        return cls(**fields)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one MLA cache row: the latent and the rotary key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_indexing_layer(self, layer: int) -> bool:
        """Whether `layer` owns an indexer, hence index keys in the cache."""
        return self.indexer_types[layer] is IndexerType.FULL

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` has routed experts."""
        return self.mlp_layer_types[layer] is MlpType.SPARSE

    @cached_property
    def indexing_layers(self) -> tuple[int, ...]:
        """Layers that own an indexer, in order."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_indexing_layer(layer))

    @cached_property
    def index_groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of layers that attend to one list: each starts at a layer that owns an indexer, and every layer is in one."""
        starts = self.indexing_layers
        assert starts, "layer 0 owns an indexer, or the file would have been refused"
        assert starts[0] == 0, "layer 0 owns an indexer, or the file would have been refused"
        ends = (*starts[1:], self.num_hidden_layers)
        return tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, in order."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Layer numbers under which the checkpoint stores its multi-token-prediction layers."""
        return tuple(range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers))
