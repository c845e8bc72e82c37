"""The bytes of GLM's paired caches, as one `CacheLayout` value: the only place that knows what a cached token looks like.

Every other part (pool, transfer, planner, kernels) takes sizes and offsets from the layout made here.
"""

from typing import Literal

from glm_runtime.config import GlmConfig
from kv_transfer.errors import ConfigError
from kv_transfer.layout import CacheComponent, CacheLayout

CacheFormat = Literal["bf16", "fp32"]
MLA_KV = "mla_kv"
INDEX_K = "index_k"
BLOCK_SIZE_TOKENS = 64

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_FORMATS: dict[str, CacheFormat] = {"bf16": "bf16", "fp32": "fp32"}
_FORMAT_OF_DTYPE: dict[str, CacheFormat] = {"bfloat16": "bf16", "float32": "fp32"}


def resolve_cache_format(config: GlmConfig, requested: str) -> CacheFormat:
    """The format that `requested` means for this checkpoint: "auto" is the checkpoint's own dtype.

    Raises ConfigError for a format that does not exist.
    """
    if requested == "auto":
        return _FORMAT_OF_DTYPE[config.dtype]
    if requested not in _FORMATS:
        raise ConfigError(f"is {requested!r}; expected 'auto', 'bf16' or 'fp32'", path="runtime.cache_format")
    return _FORMATS[requested]


def make_cache_layout(
    config: GlmConfig, cache_format: CacheFormat, model_digest: str, tokenizer_digest: str, *, block_size_tokens: int = BLOCK_SIZE_TOKENS
) -> CacheLayout:
    """The layout of one block: the MLA rows of all layers, then the index keys of the layers that own an indexer.

    Raises ConfigError for dimensions that would break the alignment of regions.
    """
    components = (mla_component(config, cache_format), index_component(config, cache_format))
    return CacheLayout(block_size_tokens, components, model_digest, tokenizer_digest)


def element_format(component: CacheComponent) -> CacheFormat:
    """What one element of a component is. Raises KeyError for an encoding that this module did not make."""
    return _FORMATS[component.encoding.split(";")[0]]


def mla_component(config: GlmConfig, cache_format: CacheFormat) -> CacheComponent:
    """One row per token and layer: [latent after its norm | rotary key after rotation]."""
    return CacheComponent(
        name=MLA_KV,
        layers=tuple(range(config.num_hidden_layers)),
        bytes_per_token=config.latent_dim * _ELEMENT_BYTES[cache_format],
        encoding=f"{cache_format}; latent {config.kv_lora_rank} | kpe {config.qk_rope_head_dim}; kpe rope pairs interleaved",
    )


def index_component(config: GlmConfig, cache_format: CacheFormat) -> CacheComponent:
    """One key per token and indexing layer: [rotated | not rotated], after LayerNorm."""
    rotated, passed = config.qk_rope_head_dim, config.index_head_dim - config.qk_rope_head_dim
    return CacheComponent(
        name=INDEX_K,
        layers=config.indexing_layers,
        bytes_per_token=config.index_head_dim * _ELEMENT_BYTES[cache_format],
        encoding=f"{cache_format}; rotated {rotated} | passed {passed}; rope pairs interleaved; no Hadamard; no scale",
    )
