"""What lies in a checkpoint directory, by headers alone: no weights are read and torch is not imported.

Knows: which tensors a `GlmConfig` needs, with shapes and dtypes; which are there; digests of both. Does not know how weights
are used (`weights.py` loads them).
"""

from pathlib import Path

from glm_runtime.config import GlmConfig


def check_checkpoint(directory: Path) -> GlmConfig:
    """Validate config.json, the tokenizer's presence and every safetensors header; fast, and enough to refuse a broken checkpoint.

    Raises ConfigError naming the file, and the field or tensor: truncated or corrupt files, missing, extra or mis-shaped tensors.
    """
    raise NotImplementedError


def checkpoint_digest(directory: Path) -> str:
    """Digest of configuration and weights, 32 hex characters; the weights version that peers compare."""
    raise NotImplementedError


def tokenizer_digest(directory: Path) -> str:
    """Digest of tokenizer.json, 32 hex characters."""
    raise NotImplementedError
