"""Random and converted checkpoints: the real pattern, valid in every format, the same for the same seed, never half there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from glm_runtime.checkpoint import check_checkpoint, checkpoint_digest
from glm_runtime.config import GlmConfig
from glm_runtime.quantisation import dequantise_block_fp8, quantise_block_fp8
from glm_runtime.safetensors_writer import SafetensorsWriter
from glm_runtime.synthetic import MAX_SHARD_BYTES, convert_checkpoint, make_checkpoint, random_pieces
from glm_runtime.synthetic_config import model_fields, token_fields
from glm_runtime.tensor_table import TensorSpec, tensor_table
from glm_runtime.weight_format import PlannedTensor
from glm_runtime.weight_scheme import WeightScheme
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import GLM53_FIELDS, TINY, write_config

CHANGES = {"vocab_size": 2560, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "kv_lora_rank": 144, "q_lora_rank": 136}


def fields(**changes: Any) -> dict[str, Any]:
    return model_fields("small", token_fields(TINY), {**CHANGES, **changes})


def make(directory: Path, scheme: WeightScheme, seed: int = 0, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    make_checkpoint(directory, fields(), scheme, seed=seed, tokenizer_dir=TINY, max_shard_bytes=max_shard_bytes)
    return directory


def load(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_the_real_size_is_the_real_configuration(tmp_path: Path) -> None:
    real = write_config(tmp_path / "real", GLM53_FIELDS).parent
    made = write_config(
        tmp_path / "made", model_fields("glm-5.3", {"eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820})
    ).parent
    assert GlmConfig.from_checkpoint(made) == GlmConfig.from_checkpoint(real)


@pytest.mark.parametrize("num_layers", [4, 11, 79])
def test_any_depth_has_the_pattern(tmp_path: Path, num_layers: int) -> None:
    write_config(tmp_path, fields(num_hidden_layers=num_layers))
    config = GlmConfig.from_checkpoint(tmp_path)
    assert config.indexing_layers == tuple(layer for layer in range(num_layers) if layer < 3 or layer % 4 == 2)
    assert config.moe_layers == tuple(range(3, num_layers))
    assert config.mtp_layers == (num_layers,)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="can be set") as caught:
        fields(hiden_size=3)
    assert caught.value.path == "hiden_size"


@pytest.mark.parametrize("scheme", WeightScheme)
@pytest.mark.parametrize("max_shard_bytes", [MAX_SHARD_BYTES, 600_000])
def test_every_scheme_is_a_valid_checkpoint(tmp_path: Path, scheme: WeightScheme, max_shard_bytes: int) -> None:
    make(tmp_path, scheme, max_shard_bytes=max_shard_bytes)
    check_checkpoint(tmp_path)
    files = sorted(file.name for file in tmp_path.glob("model*"))
    if max_shard_bytes == MAX_SHARD_BYTES:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in load(tmp_path).values())
        assert files == [*sorted(set(index["weight_map"].values())), "model.safetensors.index.json"]
        assert len(files) > 3


def test_the_seed_decides_and_the_shards_do_not(tmp_path: Path) -> None:
    one = load(make(tmp_path / "one", WeightScheme.FP8, seed=4))
    sharded = load(make(tmp_path / "sharded", WeightScheme.FP8, seed=4, max_shard_bytes=300_000))
    other = load(make(tmp_path / "other", WeightScheme.FP8, seed=5))
    assert one.keys() == sharded.keys()
    assert all(torch.equal(tensor.view(torch.uint8), sharded[name].view(torch.uint8)) for name, tensor in one.items())
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    again = make(tmp_path / "again", WeightScheme.FP8, seed=4)
    assert checkpoint_digest(again) == checkpoint_digest(tmp_path / "one")


def test_pieces_are_rows_of_one_tensor() -> None:
    spec = TensorSpec((1000, 20_000))
    shapes = [tuple(piece.shape) for piece in random_pieces("model.layers.0.mlp.up_proj.weight", spec, seed=0)]
    assert shapes == [(128, 20_000)] * 7 + [(104, 20_000)]


def test_what_fp8_quantises(tmp_path: Path) -> None:
    tensors = load(make(tmp_path, WeightScheme.FP8))
    scaled = {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}
    table = tensor_table(GlmConfig.from_checkpoint(tmp_path))
    kept = {name for name, spec in table.items() if spec.is_quantisable} - scaled
    assert kept == {name for name in table if name.endswith(("indexer.weights_proj.weight", "eh_proj.weight"))}


def test_what_nvfp4_quantises(tmp_path: Path) -> None:
    tensors = load(make(tmp_path, WeightScheme.NVFP4))
    packed = {name for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
    assert packed == {name for name in tensors if ".mlp.experts." in name and name.endswith(".weight") and ".layers.7." not in name}
    assert tensors["model.layers.7.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16


def test_conversion_to_fp8_rounds_the_source_once(tmp_path: Path) -> None:
    source = make(tmp_path / "source", WeightScheme.BF16)
    convert_checkpoint(source, tmp_path / "fp8", WeightScheme.FP8, max_shard_bytes=500_000)
    config = check_checkpoint(tmp_path / "fp8")
    plain, packed = load(source), load(tmp_path / "fp8")
    name = "model.layers.3.self_attn.kv_b_proj.weight"
    quantised, scales = quantise_block_fp8(plain[name])
    assert torch.equal(packed[name].float(), quantised.float())
    assert torch.equal(packed[name + "_scale_inv"], scales)
    assert torch.equal(packed["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    assert (tmp_path / "fp8" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert config.is_quantised
    convert_checkpoint(tmp_path / "fp8", tmp_path / "back", WeightScheme.FP32)
    assert torch.equal(load(tmp_path / "back")[name], dequantise_block_fp8(quantised, scales))
    assert not check_checkpoint(tmp_path / "back").is_quantised


def test_the_shipped_checkpoint_converts(tmp_path: Path) -> None:
    convert_checkpoint(TINY, tmp_path, WeightScheme.NVFP4)
    check_checkpoint(tmp_path)


def test_progress_counts_parameters(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = make_checkpoint(
        tmp_path,
        fields(),
        WeightScheme.NVFP4,
        seed=0,
        tokenizer_dir=TINY,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (sum(spec.num_elements for spec in tensor_table(config).values()),) * 2
    assert seen == sorted(seen)


def test_a_directory_with_weights_is_left_alone(tmp_path: Path) -> None:
    before = checkpoint_digest(make(tmp_path, WeightScheme.BF16))
    with pytest.raises(ConfigError, match=r"has model\.safetensors already"):
        make(tmp_path, WeightScheme.FP8)
    assert checkpoint_digest(tmp_path) == before


def test_what_is_interrupted_is_no_checkpoint(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path, fields(), WeightScheme.BF16, seed=0, tokenizer_dir=TINY, max_shard_bytes=600_000, on_progress=stop)
    assert list(tmp_path.glob("*.partial"))
    with pytest.raises(ConfigError):
        check_checkpoint(tmp_path)


def test_the_writer_refuses_more_bytes_than_planned(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="8 bytes left, not 12"),
        SafetensorsWriter(tmp_path, [[PlannedTensor("x", "F32", (2,))]], 100) as writer,
    ):
        writer.append("x", torch.zeros(3))


def test_the_writer_refuses_to_leave_a_tensor_out(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="every tensor must be written"),
        SafetensorsWriter(tmp_path, [[PlannedTensor("x", "F32", (2,))]], 100),
    ):
        pass
