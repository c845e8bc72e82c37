"""Which tensors a checkpoint directory holds and where, single file or sharded, by its headers and index alone.

Does not know which tensors a model needs (`tensor_check.py`). Torch is not imported.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from glm_runtime.safetensors_header import TensorHeader, read_header
from kv_transfer.errors import ConfigError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies, and what its header says."""

    file: Path
    header: TensorHeader


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


def has_weights(directory: Path) -> bool:
    """Whether there are weights at all, good or bad; config.json alone describes a model as well."""
    return (directory / INDEX_FILE).exists() or (directory / WEIGHTS_FILE).exists()


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("is not a JSON object with a weight_map of tensor names to file names", path=str(path)) from None
