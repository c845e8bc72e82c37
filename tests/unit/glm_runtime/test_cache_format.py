"""Which format lands: the table read row by row, and everything it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from glm_runtime.cache_format import INDEX_FORMATS, LANDS_AS, CacheFormats, DeviceKind, choose_cache_formats
from glm_runtime.config import GlmConfig
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import SMALL_FIELDS, TINY, write_config


@pytest.fixture(scope="module")
def tiny() -> GlmConfig:
    return GlmConfig.from_checkpoint(TINY)


def choose(model: GlmConfig, device: DeviceKind = "cpu", **choices: Any) -> CacheFormats:
    return choose_cache_formats(RuntimeConfig(checkpoint=TINY, **choices), model, device)


@pytest.mark.parametrize(
    ("device", "backend", "requested", "landed"),
    [
        ("cpu", "auto", "auto", "bf16"),
        ("cpu", "auto", "fp8", "fp8_ds_mla"),
        ("cpu", "auto", "fp8_e4m3", "fp8_e4m3"),
        ("cpu", "native", "nvfp4_ds_mla", "nvfp4_ds_mla"),
        ("cpu", "auto", "fp32", "fp32"),
        ("sm90", "flashmla_sparse", "auto", "bf16"),
        ("sm90", "flashmla_sparse", "fp8", "fp8_ds_mla"),
        ("sm90", "flashmla_sparse", "fp8_e4m3", "fp8_ds_mla"),
        ("sm10x", "flashmla_sparse", "nvfp4_ds_mla", "nvfp4_ds_mla"),
        ("sm10x", "flashinfer_mla_sparse", "auto", "fp8_e4m3"),
        ("sm10x", "flashinfer_mla_sparse", "fp8", "fp8_e4m3"),
        ("sm120", "flashinfer_mla_sparse", "fp8", "fp8_ds_mla"),
    ],
)
def test_a_request_lands_as_the_backend_reads_it_there(
    tiny: GlmConfig, device: DeviceKind, backend: str, requested: str, landed: str
) -> None:
    formats = choose(tiny, device, attention_backend=backend, cache_format=requested)
    assert formats.main == landed
    again = choose(
        tiny,
        device,
        attention_backend=formats.backend,
        cache_format=formats.main,
        index_format=formats.index,
        index_scale=formats.index_scale,
    )
    assert again == formats, "what landed lands as itself"


def test_auto_is_the_checkpoints_own_dtype(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL_FIELDS)
    assert choose(GlmConfig.from_checkpoint(tmp_path)).main == "fp32"


@pytest.mark.parametrize(
    ("choices", "index", "scale"),
    [
        ({"cache_format": "fp32"}, "fp32", "none"),
        ({"cache_format": "bf16"}, "bf16", "none"),
        ({"cache_format": "bf16", "index_format": "fp8"}, "fp8", "fp32"),
        ({"cache_format": "fp8"}, "fp8", "fp32"),
        ({"cache_format": "fp8", "index_scale": "ue8m0"}, "fp8", "ue8m0"),
        ({"cache_format": "nvfp4_ds_mla", "index_format": "mxfp4"}, "mxfp4", "ue8m0"),
    ],
)
def test_index_keys_follow_the_main_format(tiny: GlmConfig, choices: dict[str, str], index: str, scale: str) -> None:
    formats = choose(tiny, **choices)
    assert (formats.index, formats.index_scale) == (index, scale)


def test_index_scales_are_ue8m0_bytes_on_sm10x(tiny: GlmConfig) -> None:
    assert choose(tiny, "sm10x", cache_format="fp8").index_scale == "ue8m0"


@pytest.mark.parametrize(
    ("device", "choices", "path", "message"),
    [
        ("cpu", {"attention_backend": "flashmla_sparse"}, "runtime.attention_backend", "does not run on cpu; here: 'native'"),
        ("sm90", {"attention_backend": "flashinfer_mla_sparse"}, "runtime.attention_backend", "here: 'flashmla_sparse'"),
        ("sm90", {"cache_format": "nvfp4_ds_mla"}, "runtime.cache_format", "flashmla_sparse does not read on sm90"),
        ("sm90", {"cache_format": "fp32"}, "runtime.cache_format", "does not read on sm90"),
        ("cpu", {"cache_format": "fp7"}, "runtime.cache_format", "expected 'auto', 'bf16', 'fp32', 'fp8'"),
        ("cpu", {"cache_format": "fp32", "index_format": "fp8"}, "runtime.index_format", "beside a fp32 cache are 'fp32'"),
        ("cpu", {"cache_format": "bf16", "index_format": "mxfp4"}, "runtime.index_format", "are 'bf16' or 'fp8'"),
        ("cpu", {"cache_format": "fp8", "index_format": "bf16"}, "runtime.index_format", "are 'fp8' or 'mxfp4'"),
        ("cpu", {"cache_format": "bf16", "index_scale": "fp32"}, "runtime.index_scale", "of bf16 index keys is 'none'"),
        ("cpu", {"cache_format": "fp8", "index_format": "mxfp4", "index_scale": "fp32"}, "runtime.index_scale", "is 'ue8m0'"),
    ],
)
def test_what_cannot_work_is_refused_by_field(
    tiny: GlmConfig, device: DeviceKind, choices: dict[str, str], path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(tiny, device, **choices)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("change", "choices", "path", "message"),
    [
        (
            {"kv_lora_rank": 256},
            {"cache_format": "fp8_ds_mla"},
            "runtime.cache_format",
            "fp8_ds_mla need kv_lora_rank 512; this checkpoint has 256",
        ),
        ({"kv_lora_rank": 256}, {"cache_format": "nvfp4_ds_mla"}, "runtime.cache_format", "nvfp4_ds_mla need kv_lora_rank 512"),
        ({"qk_rope_head_dim": 32}, {"cache_format": "fp8_ds_mla"}, "runtime.cache_format", "qk_rope_head_dim 64; this checkpoint has 32"),
        ({"index_head_dim": 64}, {"cache_format": "bf16", "index_format": "fp8"}, "runtime.index_format", "index_head_dim 128"),
        ({"index_head_dim": 64}, {"cache_format": "fp8_e4m3", "index_format": "mxfp4"}, "runtime.index_format", "index_head_dim 128"),
    ],
)
def test_packed_formats_need_their_shapes(
    tiny: GlmConfig, change: dict[str, int], choices: dict[str, str], path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(dataclasses.replace(tiny, **change), **choices)
    assert caught.value.path == path


def test_every_format_that_lands_has_index_formats() -> None:
    assert {landed for lands_as in LANDS_AS.values() for landed in lands_as.values()} == set(INDEX_FORMATS)
