"""The header-only check: what a good directory passes, and the one clear error that each kind of damage gives."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_runtime.checkpoint import check_checkpoint, checkpoint_digest, tokenizer_digest
from glm_runtime.config import GlmConfig
from glm_runtime.stored_tensors import stored_tensors
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import SMALL_FIELDS, TINY, nvfp4_tensors, shard, write_checkpoint, write_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good"))


@pytest.fixture
def directory(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the JSON of a safetensors header in place."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])


def refused(directory: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(directory)
    return caught.value


def test_the_shipped_checkpoint_passes() -> None:
    assert check_checkpoint(TINY).num_hidden_layers == 7


def test_single_and_sharded_checkpoints_pass(directory: Path) -> None:
    before = set(stored_tensors(directory))
    check_checkpoint(directory)
    shard(directory)
    check_checkpoint(directory)
    assert set(stored_tensors(directory)) == before


def test_checking_does_not_import_torch() -> None:
    code = f"import sys, glm_runtime.checkpoint as c; c.check_checkpoint({str(TINY)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_empty_directory(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL_FIELDS)
    assert "neither model.safetensors nor" in refused(tmp_path).message


def test_a_missing_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert refused(directory).path == str(directory / "tokenizer.json")


@pytest.mark.parametrize("kept_bytes", [-1, -5000, 100_000, 200, 8, 3, 0])
def test_a_truncated_file_is_named(directory: Path, kept_bytes: int) -> None:
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(raw[:kept_bytes])
    error = refused(directory)
    assert error.path == str(directory / WEIGHTS)
    assert "truncated" in error.message or "cut off" in error.message


def test_trailing_bytes(directory: Path) -> None:
    with (directory / WEIGHTS).open("ab") as file:
        file.write(b"x")
    assert "corrupt" in refused(directory).message


@pytest.mark.parametrize("garbage", [b"\x00" * 4096, b"\xff" * 4096, struct.pack("<Q", 40) + b"{" * 5000])
def test_a_file_that_is_not_safetensors(directory: Path, garbage: bytes) -> None:
    (directory / WEIGHTS).write_bytes(garbage)
    error = refused(directory)
    assert error.path == str(directory / WEIGHTS)
    assert "not a safetensors file" in error.message


def test_overlapping_tensors(directory: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        first, second = [entry for entry in header.values() if entry.get("shape") == [96]][:2]
        second["data_offsets"] = first["data_offsets"]

    edit_header(directory / WEIGHTS, overlap)
    assert "overlap" in refused(directory).message


def test_a_tensor_whose_bytes_do_not_fit_its_shape(directory: Path) -> None:
    edit_header(directory / WEIGHTS, lambda header: header["model.norm.weight"].update(shape=[95]))
    assert "model.norm.weight" in refused(directory).message


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


DAMAGE: list[tuple[str, Callable[[dict[str, Tensor]], None], list[str]]] = [
    ("missing", drop("model.norm.weight"), ["model.norm.weight is missing (1 in all)"]),
    ("missing-expert", drop("model.layers.4.mlp.experts.7.up_proj.weight"), ["experts.7.up_proj.weight is missing"]),
    ("missing-indexer", drop("model.layers.6.self_attn.indexer.wk.weight"), ["indexer.wk.weight is missing", "makes this layer 'full'"]),
    ("missing-mtp", drop("model.layers.7.eh_proj.weight"), ["eh_proj.weight is missing", "promises the MTP layer"]),
    (
        "indexer-on-shared",
        put("model.layers.4.self_attn.indexer.wk.weight", torch.zeros(32, 96)),
        ["layers.4.self_attn.indexer.wk.weight is not one", "makes this layer 'shared'"],
    ),
    ("extra", put("model.layers.2.surprise", torch.zeros(1)), ["model.layers.2.surprise is not one"]),
    ("extra-layer", put("model.layers.8.enorm.weight", torch.zeros(96)), ["model.layers.8.enorm.weight is not one"]),
    ("mis-shaped", put("lm_head.weight", torch.zeros(193, 95)), ["lm_head.weight has shape [193, 95]", "says [193, 96]"]),
    ("bf16-bias", put("model.layers.3.mlp.gate.e_score_correction_bias", torch.zeros(8).bfloat16()), ["is BF16; expected F32"]),
    ("half", put("model.norm.weight", torch.zeros(96).half()), ["model.norm.weight is F16; expected BF16 or F32"]),
    (
        "scale-without-quantisation",
        put("model.layers.0.self_attn.o_proj.weight_scale_inv", torch.ones(1, 1)),
        ["has a scale, but config.json:quantization_config is missing"],
    ),
    (
        "fp8-without-scale",
        put("model.layers.0.self_attn.o_proj.weight", torch.zeros(96, 80).to(torch.float8_e4m3fn)),
        ["is F8_E4M3", "its scale tensor is missing"],
    ),
]


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damaged_tensors_are_named_with_their_file(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], says: list[str]) -> None:
    write_checkpoint(tmp_path, change=damage)
    error = refused(tmp_path)
    assert error.path == str(tmp_path / WEIGHTS)
    assert all(part in error.message for part in says), error.message


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", torch.ones(2, 1), "is F32 [2, 1]; expected F32 [1, 1]"),
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", torch.ones(1, 1), "has a scale but is F32; expected F8_E4M3"),
    ],
)
def test_scales_that_do_not_fit(tmp_path: Path, name: str, tensor: Tensor, says: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensor
        if tensor.shape != (1, 1):
            weight = name.replace("_scale_inv", "")
            tensors[weight] = tensors[weight].to(torch.float8_e4m3fn)

    write_checkpoint(tmp_path, {**SMALL_FIELDS, "quantization_config": {"quant_method": "fp8"}}, change=change)
    assert says in refused(tmp_path).message


def test_a_shard_that_is_not_there(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    error = refused(directory)
    assert error.path == str(directory / INDEX)
    assert "model-00002-of-00003.safetensors, which is not there" in error.message


def test_an_index_that_places_a_tensor_elsewhere(directory: Path) -> None:
    shard(directory)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    assert "lm_head.weight" in refused(directory).message


def test_a_tensor_that_no_shard_has(directory: Path) -> None:
    shard(directory)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00003-of-00003.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    error = refused(directory)
    assert error.path.endswith("model-00003-of-00003.safetensors")
    assert "ghost is missing" in error.message


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": 3}'])
def test_a_broken_index(directory: Path, content: str) -> None:
    (directory / INDEX).write_text(content)
    assert "weight_map" in refused(directory).message


def test_digests_see_weights_configuration_and_tokenizer(directory: Path) -> None:
    before = checkpoint_digest(directory), tokenizer_digest(directory)
    assert len(before[0]) == len(before[1]) == 32
    raw = bytearray((directory / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (directory / WEIGHTS).write_bytes(bytes(raw))
    assert (checkpoint_digest(directory) != before[0], tokenizer_digest(directory) == before[1]) == (True, True)
    (directory / "tokenizer.json").write_text('{"x": 1}')
    assert tokenizer_digest(directory) != before[1]


def test_digest_of_a_large_file_samples_it(directory: Path) -> None:
    before = checkpoint_digest(directory, small_file_bytes=1000)
    assert before == checkpoint_digest(directory, small_file_bytes=1000) != checkpoint_digest(directory)
    raw = bytearray((directory / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (directory / WEIGHTS).write_bytes(bytes(raw))
    assert checkpoint_digest(directory, small_file_bytes=1000) != before


EXPERT = "model.layers.4.mlp.experts.5.down_proj"
NVFP4_FIELDS = {**SMALL_FIELDS, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def write_nvfp4(directory: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """A checkpoint with NVFP4 experts."""

    def pack(tensors: dict[str, Tensor]) -> None:
        packed, _ = nvfp4_tensors(GlmConfig.from_checkpoint(directory), tensors)
        tensors.clear()
        tensors.update(packed)
        if change is not None:
            change(tensors)

    return write_checkpoint(directory, NVFP4_FIELDS, change=pack)


def test_nvfp4_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    """The configuration speaks of FP8; scalars come as one element, as some writers store them."""
    write_nvfp4(tmp_path, put(f"{EXPERT}.weight_scale_2", torch.ones(1)))
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_FIELDS, "quantization_config": {"quant_method": "fp8"}}))
    check_checkpoint(tmp_path)


NVFP4_DAMAGE: list[tuple[str, Callable[[dict[str, Tensor]], None], list[str]]] = [
    ("no-scale", drop(f"{EXPERT}.weight_scale"), [f"{EXPERT}.weight_scale is missing", "nvfp4 needs"]),
    ("no-global-scale", drop(f"{EXPERT}.weight_scale_2"), [f"{EXPERT}.weight_scale_2 is missing", "nvfp4 needs"]),
    ("no-input-scale", drop(f"{EXPERT}.input_scale"), [f"{EXPERT}.input_scale is missing", "nvfp4 needs"]),
    ("no-weight", drop(f"{EXPERT}.weight"), [f"{EXPERT}.weight is missing"]),
    ("unpacked", put(f"{EXPERT}.weight", torch.zeros(96, 48).byte()), ["has shape [96, 48]", "says [96, 24], two values a byte"]),
    ("not-bytes", put(f"{EXPERT}.weight", torch.zeros(96, 24)), [f"{EXPERT}.weight has a scale but is F32; expected U8"]),
    (
        "scale-shape",
        put(f"{EXPERT}.weight_scale", torch.zeros(96, 2).to(torch.float8_e4m3fn)),
        [f"the scale {EXPERT}.weight_scale", "is F8_E4M3 [96, 2]; expected F8_E4M3 [96, 3]"],
    ),
    ("scale-dtype", put(f"{EXPERT}.weight_scale", torch.zeros(96, 3)), ["is F32 [96, 3]; expected F8_E4M3 [96, 3]"]),
    ("scalar", put(f"{EXPERT}.weight_scale_2", torch.zeros(2)), ["is F32 [2]; expected F32 []"]),
    (
        "attention",
        put("model.layers.4.self_attn.o_proj.weight_scale", torch.zeros(96, 5).to(torch.float8_e4m3fn)),
        ["o_proj.weight_scale is not one", "NVFP4 is read for routed experts only"],
    ),
    ("both", put(f"{EXPERT}.weight_scale_inv", torch.ones(1, 1)), [f"{EXPERT}.weight has a scale but is U8; expected F8_E4M3"]),
    (
        "bytes-without-scales",
        put("model.layers.4.self_attn.o_proj.weight", torch.zeros(96, 80).byte()),
        ["o_proj.weight is U8", "its scale tensors (weight_scale and others) are missing"],
    ),
]


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in NVFP4_DAMAGE], ids=[case[0] for case in NVFP4_DAMAGE])
def test_damaged_nvfp4_is_named(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], says: list[str]) -> None:
    write_nvfp4(tmp_path, damage)
    error = refused(tmp_path)
    assert error.path == str(tmp_path / WEIGHTS)
    assert all(part in error.message for part in says), error.message


def test_nvfp4_needs_whole_groups_of_columns(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        {**NVFP4_FIELDS, "moe_intermediate_size": 40},
        change=put(f"{EXPERT}.input_scale", torch.ones(())),
    )
    assert "its 40 columns are no multiple of 16" in refused(tmp_path).message
