"""One loaded model of one rank: configuration, cache layout and weights, ready to be bound to a pool of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from glm_runtime.config import GlmConfig
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.layout import CacheLayout

if TYPE_CHECKING:
    from kv_transfer.pool_memory import PoolMemory

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all) while weights load."""


class GlmRuntime:
    """Everything of a rank that does not depend on where the cache lies."""

    runtime_config: RuntimeConfig
    config: GlmConfig
    layout: CacheLayout
    weights_version: str
    """Digest of the checkpoint; peers must agree on it."""

    @classmethod
    def load(cls, runtime_config: RuntimeConfig, on_progress: LoadProgress | None = None) -> GlmRuntime:
        """Read and check the checkpoint and load its weights; takes seconds to minutes.

        Raises ConfigError as `GlmConfig.from_checkpoint` and `check_checkpoint` do, and when `cache_bytes` holds no block.
        """
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that the configuration asks for."""
        raise NotImplementedError

    @property
    def max_model_len_tokens(self) -> int:
        """Longest sequence, prompt and output together."""
        raise NotImplementedError

    def attach(self, pool_memory: PoolMemory) -> ModelRunner:
        """Bind the model to a pool. The memory must outlive the runner. Raises ValueError if its blocks have another size."""
        raise NotImplementedError
