"""Makes checkpoints: random ones of any size, and existing ones in another weight format.

Knows: what random weights look like. Does not know which matrices a build quantises (`weight_scheme.py`). Every tensor is a function
of the seed and its name, so the same seed gives the same bytes however the files are cut. Memory is bounded by one piece of a random
tensor, or by one tensor of an existing checkpoint.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_runtime.checkpoint import TOKENIZER_FILE, check_checkpoint
from glm_runtime.config import CONFIG_FILE, GlmConfig
from glm_runtime.config_fields import FP8_BLOCK
from glm_runtime.quantisation import quantise_block_fp8, quantise_nvfp4
from glm_runtime.safetensors_writer import SafetensorsWriter, check_is_free
from glm_runtime.stored_tensors import stored_tensors
from glm_runtime.tensor_reader import TORCH_DTYPES, TensorReader
from glm_runtime.tensor_table import TensorSpec, tensor_table
from glm_runtime.weight_format import NVFP4_GROUP, WeightFormat
from glm_runtime.weight_scheme import SCHEME_FIELDS, WeightScheme, planned_tensors, scheme_format
from kv_transfer.errors import ConfigError

PIECE_ELEMENTS = 1 << 22
"""Random numbers that are drawn at a time; part of what a seed means."""
MAX_SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

WriteProgress = Callable[[int, int], None]
"""Called with (parameters written so far, parameters in all)."""
Pieces = Callable[[str, TensorSpec], Iterator[Tensor]]
"""An entry of the tensor table as consecutive runs of rows; every run but the last is a multiple of 128 rows."""


def make_checkpoint(
    directory: Path,
    fields: Mapping[str, Any],
    scheme: WeightScheme,
    *,
    seed: int,
    tokenizer_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: WriteProgress | None = None,
) -> GlmConfig:
    """Write a random checkpoint of the model that `fields` (config.json) describe, with the tokenizer of another directory.

    Raises ConfigError for fields that describe no model, a directory with weights in it, or a disk that is full.
    """
    config = write_config(directory, fields, scheme, tokenizer_dir)
    _write_weights(directory, config, scheme, lambda name, spec: random_pieces(name, spec, seed), max_shard_bytes, on_progress)
    return config


def convert_checkpoint(
    source: Path,
    directory: Path,
    scheme: WeightScheme,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: WriteProgress | None = None,
) -> GlmConfig:
    """Write an existing checkpoint again in another format, tokenizer and all. Rounds each matrix once, from what the source means.

    Raises ConfigError as `check_checkpoint` for the source, and as `make_checkpoint` for the result.
    """
    source_config = check_checkpoint(source)
    fields = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    config = write_config(directory, fields, scheme, source)
    with TensorReader(stored_tensors(source)) as reader:
        assert tensor_table(source_config).keys() == tensor_table(config).keys()
        _write_weights(directory, config, scheme, lambda name, spec: iter((reader.wide(name, spec),)), max_shard_bytes, on_progress)
    return config


def write_config(directory: Path, fields: Mapping[str, Any], scheme: WeightScheme, tokenizer_dir: Path) -> GlmConfig:
    """Write config.json and the tokenizer's files: enough for everything that needs no weights. Raises ConfigError."""
    check_is_free(directory)
    kept = {name: value for name, value in fields.items() if name not in ("torch_dtype", "quantization_config")}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).write_text(json.dumps({**kept, **SCHEME_FIELDS[scheme]}, indent=2) + "\n", encoding="utf-8")
        for name in TOKENIZER_FILES:
            if (tokenizer_dir / name).exists():
                shutil.copyfile(tokenizer_dir / name, directory / name)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", path=str(directory)) from None
    return GlmConfig.from_checkpoint(directory)


def random_tensor(name: str, spec: TensorSpec, seed: int) -> Tensor:
    """One whole tensor of a random checkpoint, fp32."""
    return torch.cat(list(random_pieces(name, spec, seed)))


def random_pieces(name: str, spec: TensorSpec, seed: int) -> Iterator[Tensor]:
    """The same in runs of rows. Scaled so that activations and scores stay of order one."""
    num_rows, columns = spec.shape[0], spec.shape[1] if len(spec.shape) > 1 else 1
    step = max(FP8_BLOCK, PIECE_ELEMENTS // columns // FP8_BLOCK * FP8_BLOCK)
    for first_row in range(0, num_rows, step):
        digest = hashlib.sha256(f"{seed}/{name}/{first_row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn((min(step, num_rows - first_row), *spec.shape[1:]), generator=generator)
        yield _scaled(name, spec, noise)


def _scaled(name: str, spec: TensorSpec, noise: Tensor) -> Tensor:
    if spec.must_be_fp32:
        return noise.mul_(0.2)  # the routing bias: large enough that dropping it changes the choice
    if len(spec.shape) == 1:
        return noise.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
    return noise if "embed_tokens" in name else noise.mul_(spec.shape[1] ** -0.5)


def _write_weights(
    directory: Path, config: GlmConfig, scheme: WeightScheme, pieces: Pieces, max_shard_bytes: int, on_progress: WriteProgress | None
) -> None:
    table = tensor_table(config)
    groups = [planned_tensors(name, spec, scheme, config) for name, spec in table.items()]
    total = sum(spec.num_elements for spec in table.values())
    done = 0
    with SafetensorsWriter(directory, groups, max_shard_bytes) as writer:
        for (name, spec), group in zip(table.items(), groups, strict=True):
            weight_format = scheme_format(name, spec, scheme, config)
            for piece in _whole(pieces(name, spec)) if weight_format is WeightFormat.NVFP4 else pieces(name, spec):
                for planned, content in zip(group, _encode(name, piece, weight_format), strict=True):
                    writer.append(planned.name, content.to(TORCH_DTYPES[planned.dtype]))
                done += piece.numel()
                if on_progress is not None:
                    on_progress(done, total)


def _whole(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """All rows at once: NVFP4's global scale is the whole matrix's."""
    yield torch.cat(list(pieces))


def _encode(name: str, piece: Tensor, weight_format: WeightFormat) -> tuple[Tensor, ...]:
    """The stored tensors' contents, in the order of `stored_forms`."""
    if weight_format is WeightFormat.BLOCK_FP8:
        return quantise_block_fp8(piece)
    if weight_format is WeightFormat.NVFP4:
        if piece.shape[1] % NVFP4_GROUP:
            raise ConfigError(f"has {piece.shape[1]} columns; NVFP4 takes multiples of {NVFP4_GROUP}", path=name)
        # The scale of activations comes from a calibration, which is not made here; 1 says so.
        return (*quantise_nvfp4(piece), torch.ones(()))
    return (piece,)
