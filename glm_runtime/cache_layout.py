"""The bytes of GLM's paired caches, as one `CacheLayout` value: the only place that knows what a cached token looks like.

Every other part (pool, transfer, planner, kernels) takes sizes and offsets from the layout made here.
"""

from glm_runtime.cache_format import CacheFormats
from glm_runtime.config import GlmConfig
from glm_runtime.row_format import index_encoding, make_row_format, mla_encoding
from kv_transfer.layout import CacheComponent, CacheLayout

MLA_KV = "mla_kv"
INDEX_K = "index_k"
BLOCK_SIZE_TOKENS = 64


def make_cache_layout(
    config: GlmConfig, formats: CacheFormats, model_digest: str, tokenizer_digest: str, *, block_size_tokens: int = BLOCK_SIZE_TOKENS
) -> CacheLayout:
    """The layout of one block: the MLA rows of all layers, then the index keys of the layers that own an indexer.

    Raises ConfigError for dimensions that would break the alignment of regions.
    """
    components = (mla_component(config, formats), index_component(config, formats))
    return CacheLayout(block_size_tokens, components, model_digest, tokenizer_digest)


def mla_component(config: GlmConfig, formats: CacheFormats) -> CacheComponent:
    """One row per token and layer: [latent after its norm | rotary key after rotation], rounded as the format says."""
    return CacheComponent(
        name=MLA_KV,
        layers=tuple(range(config.num_hidden_layers)),
        bytes_per_token=make_row_format(formats.main_kind, config.latent_dim).bytes_per_token,
        encoding=mla_encoding(formats.main_kind, config.kv_lora_rank, config.qk_rope_head_dim),
    )


def index_component(config: GlmConfig, formats: CacheFormats) -> CacheComponent:
    """One key per token and indexing layer: [rotated | not rotated], after LayerNorm."""
    rotated = config.qk_rope_head_dim
    return CacheComponent(
        name=INDEX_K,
        layers=config.indexing_layers,
        bytes_per_token=make_row_format(formats.index_kind, config.index_head_dim).bytes_per_token,
        encoding=index_encoding(formats.index_kind, rotated, config.index_head_dim - rotated),
    )


def landed_formats(layout: CacheLayout) -> tuple[tuple[str, str], ...]:
    """(component, format) of each component, for reports: ("mla_kv", "fp8_ds_mla"), ("index_k", "fp8 fp32-scaled")."""
    return tuple((component.name, component.encoding.split(";")[0]) for component in layout.components)
