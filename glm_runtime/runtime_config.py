"""How one rank runs the model: what to load, in which numerics, with how much cache. No dimensions of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CacheFormatChoice = Literal["auto", "bf16", "fp32"]
NumericsChoice = Literal["deterministic", "fast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """One rank's runtime.

    cache_format: "auto" takes the checkpoint's dtype. numerics: "deterministic" makes a row's bits depend on its own sequence
    only; "fast" computes in the checkpoint's dtype. num_threads: None keeps torch's choice. cache_bytes: the pool; it is rounded
    down to whole blocks. max_step_tokens: most rows one step may have. max_model_len_tokens: longest sequence; None takes the
    model's max_position_embeddings.
    """

    checkpoint: Path
    cache_format: CacheFormatChoice = "auto"
    numerics: NumericsChoice = "deterministic"
    num_threads: int | None = None
    cache_bytes: int = 512 << 20
    max_step_tokens: int = 2048
    max_model_len_tokens: int | None = None
    block_size_tokens: int = 64
