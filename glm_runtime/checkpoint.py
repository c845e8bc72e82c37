"""Whether a checkpoint directory is whole, by headers alone, and digests of what is in it: torch is not imported.

Knows: what makes a directory a checkpoint. Does not know where tensors lie (`stored_tensors.py`), which ones there must be
(`tensor_check.py`), or how weights are used (`weights.py` loads them).
"""

import hashlib
from pathlib import Path

from glm_runtime.config import CONFIG_FILE, GlmConfig
from glm_runtime.stored_tensors import stored_tensors
from glm_runtime.tensor_check import check_tensors
from kv_transfer.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
SMALL_FILE_BYTES = 64 << 20
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def check_checkpoint(directory: Path) -> GlmConfig:
    """Validate config.json, the tokenizer's presence and every safetensors header; fast, and enough to refuse a broken checkpoint.

    Raises ConfigError naming the file, and the field or tensor: truncated or corrupt files, missing, extra or mis-shaped tensors.
    """
    directory = Path(directory)
    config = GlmConfig.from_checkpoint(directory)
    check_tensors(config, stored_tensors(directory), directory)
    tokenizer_digest(directory)
    return config


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
