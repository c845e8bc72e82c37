"""What inspect says: from config.json alone, and from weights."""

import json
from pathlib import Path

import pytest

from cluster.checkpoint_report import describe_checkpoint, render_report
from glm_runtime.weight_scheme import WeightScheme
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import GLM53_FIELDS, SMALL_FIELDS, TINY, shard, write_checkpoint, write_config


def test_glm_5_3_from_its_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM53_FIELDS))
    report = describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=8)
    assert report["parameters"]["total"] == 753_329_940_480
    assert len(report["layers"]) == 78
    assert sum(layer["indexer"] == "full" for layer in report["layers"]) == len(report["index_groups"]) == 21
    assert report["index_groups"][:4] == [[0], [1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert report["tensors"] is None
    text = render_report(report)
    for part in ("743.38 B + 9.95 B", "40.30 B active with the head, 39.35 B without", "dense 0-2; MoE 3-77; MTP 78", "TP8", "DCP8"):
        assert part in text


def test_cache_formats_of_glm_5_3(tmp_path: Path) -> None:
    """Bytes per token, all layers, without and with the MTP layer."""
    (tmp_path / "config.json").write_text(json.dumps(GLM53_FIELDS))
    report = describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=8)
    formats = {entry["format"]: (entry["bytes_per_token"], entry["bytes_per_token_with_mtp"]) for entry in report["cache_formats"]}
    assert formats["bf16+fp8"] == (92_628, 93_912)
    assert formats["fp8_ds_mla+fp8"] == (53_940, 54_728)
    assert formats["fp8_e4m3+fp8"] == (47_700, 48_408)
    assert formats["nvfp4_ds_mla+fp8"][0] == 30_228
    assert report["capacity"]["cache_format"] == "fp8_ds_mla+fp8"
    tokens = {(group["gpu"], group["split"]): group["kv_tokens"] for group in report["capacity"]["groups"]}
    for split, million_tokens in (("TP8", 0.50), ("DP8", 2.0), ("DCP8", 3.6)):
        assert tokens["H200", split] == pytest.approx(million_tokens * 1e6, rel=0.05)
    wider = describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=8, cache_format="bf16+fp8")
    assert all(group["kv_tokens"] <= tokens[group["gpu"], group["split"]] for group in wider["capacity"]["groups"])


def test_packed_formats_need_the_real_widths(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL_FIELDS)
    report = describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=1)
    assert {entry["format"] for entry in report["cache_formats"]} == {"bf16+bf16", "fp32+fp32"}
    assert report["capacity"]["cache_format"] == "bf16+bf16"
    with pytest.raises(ConfigError, match=r"is 'fp8_ds_mla\+fp8'; this model's are"):
        describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=1, cache_format="fp8_ds_mla+fp8")


def test_weights_are_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    shard(tmp_path, 3)
    tensors = describe_checkpoint(tmp_path, scheme=WeightScheme.BF16, num_gpus=1)["tensors"]
    assert tensors["files"] == 3
    assert tensors["bytes"] == sum(tensors["bytes_by_dtype"].values())
    assert set(tensors["bytes_by_dtype"]) == {"F32"}
    assert set(tensors["matrices_by_format"]) == {"plain"}


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing"):
        describe_checkpoint(tmp_path, scheme=WeightScheme.BF16, num_gpus=1)


def test_gpus_that_do_not_divide_the_model(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL_FIELDS)
    with pytest.raises(ConfigError, match="4 attention heads cannot be split over 3 GPUs"):
        describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=3)


def test_by_default_a_group_is_as_large_as_the_model_allows() -> None:
    assert describe_checkpoint(TINY, scheme=WeightScheme.FP8)["capacity"]["num_gpus"] == 4


def test_every_format_says_what_a_block_takes() -> None:
    for entry in describe_checkpoint(TINY, scheme=WeightScheme.BF16, num_gpus=1)["cache_formats"]:
        assert entry["block_bytes"] == 64 * entry["bytes_per_token"]
        assert entry["bytes_per_token_with_mtp"] == entry["bytes_per_token"] + sum(entry["components"].values())


def test_a_model_without_mtp_and_without_shared_indexers(tmp_path: Path) -> None:
    fields = {name: value for name, value in SMALL_FIELDS.items() if not name.startswith("index_topk_freq")}
    write_config(tmp_path, {**fields, "num_nextn_predict_layers": 0, "indexer_types": ["full"] * 7})
    text = render_report(describe_checkpoint(tmp_path, scheme=WeightScheme.FP8, num_gpus=4))
    assert "no MTP layer" in text
    assert "without MTP" in text
    assert "7 full (0-6), 0 shared" in text
