"""Golden numbers of the cache layout: a change of layout is a deliberate act."""

from pathlib import Path

import pytest

from glm_runtime.cache_layout import INDEX_K, MLA_KV, element_format, make_cache_layout, mla_component, resolve_cache_format
from glm_runtime.config import GlmConfig
from kv_transfer.errors import ConfigError
from kv_transfer.layout import CacheComponent, CacheLayout
from tests.glm_checkpoints import GLM53_FIELDS, TINY, write_config


@pytest.fixture
def glm53(tmp_path: Path) -> GlmConfig:
    write_config(tmp_path, GLM53_FIELDS)
    return GlmConfig.from_checkpoint(tmp_path)


def test_glm_5_3_with_bf16_latents_and_fp8_index_keys_is_5_928_192_bytes_a_block(glm53: GlmConfig) -> None:
    index = CacheComponent(INDEX_K, glm53.indexing_layers, 132, "e4m3 planar, fp32 scales")
    layout = CacheLayout(64, (mla_component(glm53, "bf16"), index), "", "")
    assert layout.block_bytes == 5_928_192
    assert layout.bytes_per_token == 92_628


@pytest.mark.parametrize(("cache_format", "mla_bytes", "index_bytes"), [("bf16", 1152, 256), ("fp32", 2304, 512)])
def test_glm_5_3_bytes_per_token(glm53: GlmConfig, cache_format: str, mla_bytes: int, index_bytes: int) -> None:
    layout = make_cache_layout(glm53, resolve_cache_format(glm53, cache_format), "m", "t")
    mla, index = layout.components
    assert (mla.name, mla.bytes_per_token, len(mla.layers)) == (MLA_KV, mla_bytes, 78)
    assert (index.name, index.bytes_per_token, len(index.layers)) == (INDEX_K, index_bytes, 21)
    assert layout.bytes_per_token == 78 * mla_bytes + 21 * index_bytes


def test_the_shipped_checkpoint_is_581_632_bytes_a_block() -> None:
    layout = make_cache_layout(GlmConfig.from_checkpoint(TINY), "bf16", "m", "t")
    assert layout.block_bytes == 64 * (7 * 1152 + 4 * 256) == 581_632
    assert next(region.offset_bytes for region in layout.regions if region.component == INDEX_K) == 7 * 64 * 1152


def test_encodings_say_dtype_pair_order_and_no_hadamard() -> None:
    mla, index = make_cache_layout(GlmConfig.from_checkpoint(TINY), "bf16", "m", "t").components
    assert mla.encoding == "bf16; latent 512 | kpe 64; kpe rope pairs interleaved"
    assert index.encoding == "bf16; rotated 64 | passed 64; rope pairs interleaved; no Hadamard; no scale"


def test_the_fingerprint_tells_formats_models_and_tokenizers_apart() -> None:
    config = GlmConfig.from_checkpoint(TINY)
    variants = [("bf16", "m", "t"), ("fp32", "m", "t"), ("bf16", "n", "t"), ("bf16", "m", "u")]
    prints = {make_cache_layout(config, resolve_cache_format(config, kind), model, tok).fingerprint for kind, model, tok in variants}
    assert len(prints) == 4


def test_auto_is_the_checkpoints_own_dtype() -> None:
    config = GlmConfig.from_checkpoint(TINY)
    assert resolve_cache_format(config, "auto") == "bf16"
    with pytest.raises(ConfigError, match="fp4"):
        resolve_cache_format(config, "fp4")


def test_a_foreign_encoding_has_no_element_format() -> None:
    with pytest.raises(KeyError):
        element_format(CacheComponent("mla_kv", (0,), 656, "e4m3 tiles"))
