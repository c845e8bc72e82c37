"""The bytes of GLM's paired caches, as one `CacheLayout` value: the only place that knows what a cached token looks like.

Every other part (pool, transfer, planner, kernels) takes sizes and offsets from the layout made here.
"""

from glm_runtime.cache_format import CacheFormats
from glm_runtime.config import GlmConfig
from glm_runtime.row_format import index_encoding, make_row_format, mla_encoding
from kv_transfer.layout import CacheComponent, CacheLayout

MLA_KV = "mla_kv"
INDEX_K = "index_k"
MTP_MLA_KV = "mtp_mla_kv"
MTP_INDEX_K = "mtp_index_k"
BLOCK_SIZE_TOKENS = 64


def make_cache_layout(
    config: GlmConfig,
    formats: CacheFormats,
    model_digest: str,
    tokenizer_digest: str,
    *,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
    with_mtp: bool = False,
) -> CacheLayout:
    """The layout of one block: the MLA rows of all layers and, with_mtp, of the MTP layer, then the index keys in the same order.

    The MTP layer's keys at a position are made from the *next* token too, so with them a block's key looks one token ahead.
    Raises ConfigError for dimensions that would break the alignment of regions.
    """
    target, mtp = tuple(range(config.num_hidden_layers)), config.mtp_layers if with_mtp else ()
    components = [mla_component(config, formats, MLA_KV, target), index_component(config, formats, INDEX_K, config.indexing_layers)]
    if mtp:
        components.insert(1, mla_component(config, formats, MTP_MLA_KV, mtp))
        components.append(index_component(config, formats, MTP_INDEX_K, mtp))
    return CacheLayout(block_size_tokens, tuple(components), model_digest, tokenizer_digest)


def mla_component(config: GlmConfig, formats: CacheFormats, name: str, layers: tuple[int, ...]) -> CacheComponent:
    """One row per token and layer: [latent after its norm | rotary key after rotation], rounded as the format says."""
    return CacheComponent(
        name=name,
        layers=layers,
        bytes_per_token=make_row_format(formats.main_kind, config.latent_dim).bytes_per_token,
        encoding=mla_encoding(formats.main_kind, config.kv_lora_rank, config.qk_rope_head_dim),
        keyed_by_next_token=name == MTP_MLA_KV,
    )


def index_component(config: GlmConfig, formats: CacheFormats, name: str, layers: tuple[int, ...]) -> CacheComponent:
    """One key per token and indexing layer: [rotated | not rotated], after LayerNorm."""
    rotated = config.qk_rope_head_dim
    return CacheComponent(
        name=name,
        layers=layers,
        bytes_per_token=make_row_format(formats.index_kind, config.index_head_dim).bytes_per_token,
        encoding=index_encoding(formats.index_kind, rotated, config.index_head_dim - rotated),
        keyed_by_next_token=name == MTP_INDEX_K,
    )


def landed_formats(layout: CacheLayout) -> tuple[tuple[str, str], ...]:
    """(component, format) of each component, for reports: ("mla_kv", "fp8_ds_mla"), ("index_k", "fp8 fp32-scaled")."""
    return tuple((component.name, component.encoding.split(";")[0]) for component in layout.components)
