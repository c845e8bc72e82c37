"""Generation in one process, without workers: what the cluster's answers are compared with."""

from collections.abc import Sequence

from glm_runtime.runtime import GlmRuntime
from kv_transfer.messages import SamplingParameters


def generate(
    runtime: GlmRuntime,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
    *,
    chunk_tokens: int | None = None,
    max_batch_sequences: int = 16,
    num_blocks: int | None = None,
) -> list[list[int]]:
    """The output tokens of each prompt, the stop token included when there is one.

    chunk_tokens: most prompt tokens of a sequence per step (None: as many as the step may have). max_batch_sequences: most
    sequences per step. num_blocks: pool size (None: what the prompts need). Results do not depend on any of them in
    deterministic mode.
    """
    raise NotImplementedError
