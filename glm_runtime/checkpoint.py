"""What lies in a checkpoint directory, by headers alone: no weights are read and torch is not imported.

Knows: whether the tensors that a `GlmConfig` needs are there, and digests of what is. Does not know how a safetensors file is
built (`safetensors_header.py`), the table of tensors (`tensor_table.py`), or how weights are used (`weights.py` loads them).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm_runtime.config import CONFIG_FILE, GlmConfig
from glm_runtime.safetensors_header import TensorHeader, read_header
from glm_runtime.tensor_table import SCALE_SUFFIX, TensorSpec, scale_shape, tensor_table
from kv_transfer.errors import ConfigError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"

FP8_DTYPE = "F8_E4M3"
PLAIN_DTYPES = ("BF16", "F32")
SMALL_FILE_BYTES = 64 << 20
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies, and what its header says."""

    file: Path
    header: TensorHeader


def check_checkpoint(directory: Path) -> GlmConfig:
    """Validate config.json, the tokenizer's presence and every safetensors header; fast, and enough to refuse a broken checkpoint.

    Raises ConfigError naming the file, and the field or tensor: truncated or corrupt files, missing, extra or mis-shaped tensors.
    """
    directory = Path(directory)
    config = GlmConfig.from_checkpoint(directory)
    check_tensors(config, stored_tensors(directory), directory)
    tokenizer_digest(directory)
    return config


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, single file or sharded, by name.

    Raises ConfigError naming the file: none there, an unreadable or truncated one, or an index that contradicts the files.
    """
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        path = directory / WEIGHTS_FILE
        if not path.exists():
            raise ConfigError(f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}; is it a checkpoint directory?", path=str(directory))
        return {name: StoredTensor(file=path, header=header) for name, header in read_header(path).items()}
    placed = _read_index(index_path)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(placed.values())):
        path = directory / file
        if not path.exists():
            raise ConfigError(f"names {file}, which is not there", path=str(index_path))
        for name, header in read_header(path).items():
            if placed.get(name) != file:
                raise ConfigError(f"places {name} in {placed.get(name, 'no file')}, but {file} has it", path=str(index_path))
            stored[name] = StoredTensor(file=path, header=header)
    if lost := sorted(set(placed) - set(stored)):
        raise ConfigError(f"tensor {lost[0]} is missing, although {INDEX_FILE} places it here", path=str(directory / placed[lost[0]]))
    return stored


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("is not a JSON object with a weight_map of tensor names to file names", path=str(path)) from None


def check_tensors(config: GlmConfig, stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Compare what is stored with what the configuration needs: names, shapes, dtypes, scales.

    Raises ConfigError naming file and tensor for the first mismatch, and how many there are.
    """
    table = tensor_table(config)
    if missing := [name for name in table if name not in stored]:
        raise ConfigError(_missing_message(config, missing), path=str(_home_of_missing(directory)))
    for name, spec in table.items():
        _check_tensor(config, name, spec, stored)
    scales = {name.removesuffix(".weight") + SCALE_SUFFIX for name, spec in table.items() if spec.is_quantisable}
    if extra := sorted(name for name in stored if name not in table and name not in scales):
        raise ConfigError(_extra_message(config, extra), path=str(stored[extra[0]].file))


def _home_of_missing(directory: Path) -> Path:
    index_path = directory / INDEX_FILE
    return index_path if index_path.exists() else directory / WEIGHTS_FILE


def _missing_message(config: GlmConfig, missing: list[str]) -> str:
    name = missing[0]
    reason = ""
    if ".indexer." in name:
        reason = f"; {CONFIG_FILE}:indexer_types makes this layer 'full', so it needs an indexer"
    elif config.mtp_layers and name.startswith(f"model.layers.{config.mtp_layers[0]}."):
        reason = f"; {CONFIG_FILE}:num_nextn_predict_layers = {config.num_nextn_predict_layers} promises the MTP layer"
    return f"tensor {name} is missing ({len(missing)} in all){reason}"


def _extra_message(config: GlmConfig, extra: list[str]) -> str:
    name = extra[0]
    reason = ""
    if ".indexer." in name and any(
        name.startswith(f"model.layers.{layer}.") for layer in range(config.num_hidden_layers) if not config.is_indexing_layer(layer)
    ):
        reason = f"; {CONFIG_FILE}:indexer_types makes this layer 'shared', so it has no indexer"
    elif name.startswith(f"model.layers.{config.num_hidden_layers}."):
        reason = f"; {CONFIG_FILE} has {config.num_hidden_layers} layers and num_nextn_predict_layers = {config.num_nextn_predict_layers}"
    return f"tensor {name} is not one that {CONFIG_FILE} describes ({len(extra)} in all){reason}"


def _check_tensor(config: GlmConfig, name: str, spec: TensorSpec, stored: Mapping[str, StoredTensor]) -> None:
    tensor = stored[name]
    where = str(tensor.file)
    if tensor.header.shape != spec.shape:
        raise ConfigError(f"tensor {name} has shape {list(tensor.header.shape)}; {CONFIG_FILE} says {list(spec.shape)}", path=where)
    scale = stored.get(name.removesuffix(".weight") + SCALE_SUFFIX) if spec.is_quantisable else None
    if scale is None:
        allowed = ("F32",) if spec.must_be_fp32 else PLAIN_DTYPES
        if tensor.header.dtype not in allowed:
            hint = "; its scale tensor is missing" if tensor.header.dtype == FP8_DTYPE else ""
            raise ConfigError(f"tensor {name} is {tensor.header.dtype}; expected {' or '.join(allowed)}{hint}", path=where)
        return
    if not config.is_block_fp8:
        raise ConfigError(f"tensor {name} has a scale, but {CONFIG_FILE}:quantization_config is missing", path=where)
    if tensor.header.dtype != FP8_DTYPE:
        raise ConfigError(f"tensor {name} has a scale but is {tensor.header.dtype}; expected {FP8_DTYPE}", path=where)
    expected = scale_shape(spec.shape)
    if scale.header.shape != expected or scale.header.dtype != "F32":
        raise ConfigError(
            f"the scale of {name} is {scale.header.dtype} {list(scale.header.shape)}; expected F32 {list(expected)}", path=str(scale.file)
        )


def checkpoint_digest(directory: Path, *, small_file_bytes: int = SMALL_FILE_BYTES) -> str:
    """Digest of configuration and weights, 32 hex characters; the weights version that peers compare.

    Files over `small_file_bytes` count by their header and 64 evenly spaced pages, so that a checkpoint of many hundred GB costs
    milliseconds per file; two checkpoints of equal shapes that differ nowhere in those pages would pass as one.
    Raises ConfigError for an unreadable file.
    """
    directory = Path(directory)
    digest = hashlib.sha256()
    digest.update(_read_bytes(directory / CONFIG_FILE))
    for path in sorted({tensor.file for tensor in stored_tensors(directory).values()}):
        digest.update(path.name.encode())
        _digest_file(path, digest, small_file_bytes)
    return digest.hexdigest()[:32]


def tokenizer_digest(directory: Path) -> str:
    """Digest of tokenizer.json, 32 hex characters. Raises ConfigError when it is missing."""
    return hashlib.sha256(_read_bytes(Path(directory) / TOKENIZER_FILE)).hexdigest()[:32]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); a checkpoint directory needs it", path=str(path)) from None


def _digest_file(path: Path, digest: "hashlib._Hash", small_file_bytes: int) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= small_file_bytes:
            while piece := file.read(1 << 20):
                digest.update(piece)
            return
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        digest.update(file.read(header_bytes))
        for sample in range(_SAMPLES_PER_FILE):
            file.seek(header_bytes + (size - header_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1))
            digest.update(file.read(_SAMPLE_BYTES))
