"""Golden numbers of the cache layout: a change of layout is a deliberate act."""

from itertools import pairwise
from pathlib import Path

import pytest

from glm_runtime.cache_format import CacheFormats
from glm_runtime.cache_layout import INDEX_K, MLA_KV, MTP_INDEX_K, MTP_MLA_KV, landed_formats, make_cache_layout
from glm_runtime.config import GlmConfig
from glm_runtime.row_format import row_format_of
from kv_transfer.layout import CacheComponent, CacheLayout
from tests.glm_checkpoints import GLM53_FIELDS, TINY, write_config

ALL_FORMATS = {
    "fp32": CacheFormats(backend="native", main="fp32", index="fp32", index_scale="none"),
    "bf16": CacheFormats(backend="native", main="bf16", index="bf16", index_scale="none"),
    "bf16+fp8": CacheFormats(backend="native", main="bf16", index="fp8", index_scale="fp32"),
    "fp8_e4m3": CacheFormats(backend="native", main="fp8_e4m3", index="fp8", index_scale="fp32"),
    "fp8_ds_mla": CacheFormats(backend="native", main="fp8_ds_mla", index="fp8", index_scale="fp32"),
    "fp8_ds_mla+ue8m0": CacheFormats(backend="native", main="fp8_ds_mla", index="fp8", index_scale="ue8m0"),
    "nvfp4_ds_mla": CacheFormats(backend="native", main="nvfp4_ds_mla", index="fp8", index_scale="fp32"),
    "nvfp4_ds_mla+mxfp4": CacheFormats(backend="native", main="nvfp4_ds_mla", index="mxfp4", index_scale="ue8m0"),
}


@pytest.fixture
def glm53(tmp_path: Path) -> GlmConfig:
    write_config(tmp_path, GLM53_FIELDS)
    return GlmConfig.from_checkpoint(tmp_path)


def tiny_layout(name: str, model: str = "m", tokenizer: str = "t") -> CacheLayout:
    return make_cache_layout(GlmConfig.from_checkpoint(TINY), ALL_FORMATS[name], model, tokenizer)


def test_glm_5_3_with_bf16_latents_and_fp8_index_keys_is_5_928_192_bytes_a_block(glm53: GlmConfig) -> None:
    assert make_cache_layout(glm53, ALL_FORMATS["bf16+fp8"], "m", "t").block_bytes == 5_928_192


@pytest.mark.parametrize(
    ("name", "mla_bytes", "index_bytes", "bytes_per_token"),
    [
        ("fp32", 2304, 512, 190_464),
        ("bf16", 1152, 256, 95_232),
        ("bf16+fp8", 1152, 132, 92_628),
        ("fp8_e4m3", 576, 132, 47_700),
        ("fp8_ds_mla", 656, 132, 53_940),
        ("fp8_ds_mla+ue8m0", 656, 132, 53_940),
        ("nvfp4_ds_mla", 352, 132, 30_228),
        ("nvfp4_ds_mla+mxfp4", 352, 68, 28_884),
    ],
)
def test_glm_5_3_bytes_per_token(glm53: GlmConfig, name: str, mla_bytes: int, index_bytes: int, bytes_per_token: int) -> None:
    layout = make_cache_layout(glm53, ALL_FORMATS[name], "m", "t")
    mla, index = layout.components
    assert (mla.name, mla.bytes_per_token, len(mla.layers)) == (MLA_KV, mla_bytes, 78)
    assert (index.name, index.bytes_per_token, len(index.layers)) == (INDEX_K, index_bytes, 21)
    assert layout.bytes_per_token == bytes_per_token


def test_the_shipped_checkpoint_is_581_632_bytes_a_block() -> None:
    layout = tiny_layout("bf16")
    assert layout.block_bytes == 64 * (7 * 1152 + 4 * 256) == 581_632
    assert next(region.offset_bytes for region in layout.regions if region.component == INDEX_K) == 7 * 64 * 1152


def test_encodings_say_dtype_scales_pair_order_and_no_hadamard() -> None:
    mla, index = tiny_layout("bf16").components
    assert mla.encoding == "bf16; latent 512 | kpe 64; kpe rope pairs interleaved"
    assert index.encoding == "bf16; rotated 64 | passed 64; rope pairs interleaved; no Hadamard; no scale"
    mla, index = tiny_layout("fp8_ds_mla").components
    assert mla.encoding == (
        "fp8_ds_mla; latent 512 e4m3 | 4 scales fp32 | kpe 64 bf16; scale of 128 = 2^ceil(log2(max(amax/448, 1e-4))); "
        "kpe rope pairs interleaved"
    )
    assert index.encoding == (
        "fp8 fp32-scaled; rotated 64 | passed 64; rope pairs interleaved; no Hadamard; planes of 128 e4m3, 1 scale fp32; "
        "scale of 128 = 2^ceil(log2(max(amax, 1e-4)/448))"
    )
    assert tiny_layout("fp8_e4m3").components[0].encoding == (
        "fp8_e4m3; latent 512 e4m3 | kpe 64 e4m3; one scale of 1.0; kpe rope pairs interleaved"
    )


def test_the_fingerprint_tells_formats_models_and_tokenizers_apart() -> None:
    prints = {tiny_layout(name).fingerprint for name in ALL_FORMATS}
    prints |= {tiny_layout("bf16", model="n").fingerprint, tiny_layout("bf16", tokenizer="u").fingerprint}
    assert len(prints) == len(ALL_FORMATS) + 2


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_planes_fill_a_region_exactly(name: str) -> None:
    for component in tiny_layout(name).components:
        row_format = row_format_of(component)
        ends = [size * 64 for size in row_format.plane_bytes]
        offsets = [*row_format.plane_offsets(64), component.bytes_per_token * 64]
        assert [end - start for start, end in pairwise(offsets)] == ends


def test_index_scales_lie_behind_the_data_of_the_whole_block() -> None:
    index = tiny_layout("fp8_ds_mla").components[1]
    assert row_format_of(index).plane_offsets(64) == (0, 8192)
    assert index.bytes_per_token * 64 == 8448


def test_formats_are_reported_by_component() -> None:
    assert landed_formats(tiny_layout("fp8_ds_mla+ue8m0")) == (("mla_kv", "fp8_ds_mla"), ("index_k", "fp8 ue8m0-scaled"))


def test_a_foreign_encoding_has_no_row_format() -> None:
    with pytest.raises(ValueError, match="e4m3 tiles"):
        row_format_of(CacheComponent("mla_kv", (0,), 656, "e4m3 tiles"))


@pytest.mark.parametrize(("name", "bytes_per_token"), [("bf16+fp8", 93_912), ("fp8_ds_mla", 54_728), ("fp8_e4m3", 48_408)])
def test_glm_5_3_bytes_per_token_with_the_mtp_layer(glm53: GlmConfig, name: str, bytes_per_token: int) -> None:
    layout = make_cache_layout(glm53, ALL_FORMATS[name], "m", "t", with_mtp=True)
    assert layout.bytes_per_token == bytes_per_token
    assert [(component.name, component.layers[-1]) for component in layout.components] == [
        (MLA_KV, 77), (MTP_MLA_KV, 78), (INDEX_K, 74), (MTP_INDEX_K, 78),
    ]  # fmt: skip


def test_with_the_mtp_layer_keys_look_ahead_and_others_do_not_pair(glm53: GlmConfig) -> None:
    plain, with_mtp = (make_cache_layout(glm53, ALL_FORMATS["bf16+fp8"], "m", "t", with_mtp=on) for on in (False, True))
    assert (plain.looks_one_token_ahead, with_mtp.looks_one_token_ahead) == (False, True)
    assert plain.fingerprint != with_mtp.fingerprint
