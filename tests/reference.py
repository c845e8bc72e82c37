"""The runtime called in one process: what the cluster's answers must equal, token by token, without a margin."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config_file import load_config
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from kv_transfer.messages import SamplingParameters


class Reference:
    """The shipped checkpoint as `serve` configures it by default but for these fields of `RuntimeConfig`, one token at a time."""

    def __init__(self, changes: Mapping[str, Any] | None = None) -> None:
        config, _ = load_config(None)
        # The file's "auto" has been resolved for its own cache format; another one leads to others.
        formats = {"index_format": "auto", "index_scale": "auto"} if changes and "cache_format" in changes else {}
        self._runtime = GlmRuntime.load(dataclasses.replace(config.runtime, **{**formats, **(changes or {})}))

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The most likely tokens after each prompt, end tokens included and passed over."""
        return self.draw(prompts, SamplingParameters(max_tokens=max_tokens, seed=0, temperature=0.0))

    def draw(self, prompts: Sequence[Sequence[int]], sampling: SamplingParameters) -> list[list[int]]:
        """The tokens that these sampling parameters draw after each prompt."""
        return generate(self._runtime, prompts, sampling, max_drafts=0)
