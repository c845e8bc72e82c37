"""transformers' `generate` behind `engine_process.py`: `python -m benchmarks.engine.transformers_engine CHECKPOINT DTYPE EXPERTS THREADS`.

Forced tokens come from a logits processor, which is also where time is taken: a step is from one call of it to the next, so that what
`generate` sets up before its first step is not counted against it.
"""

import copy
import sys
import time
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GlmMoeDsaForCausalLM, LogitsProcessor, LogitsProcessorList

from benchmarks.engine.command_loop import serve

FILL_CHUNK_TOKENS = 1024
"""A context of 8K in one forward takes 15 GB; what is filled is not timed."""


class TransformersEngine:
    """The model as it comes, but for the latent norms' eps, which it does not take from the config."""

    def __init__(self, checkpoint: str, dtype: str, experts: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        transformers.utils.logging.set_verbosity_error()
        self._model = GlmMoeDsaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), experts_implementation=experts).eval()
        for layer in self._model.model.layers:
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                norm.variance_epsilon = self._model.config.rms_norm_eps
        self._cache: DynamicCache | None = None
        self._context: list[int] = []
        self._batch = 0

    def log_probs(self, tokens: list[int]) -> list[float]:
        """Of the token after the prompt."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
        return [float(value) for value in logits.float().log_softmax(-1)]

    def prefill(self, tokens: list[int]) -> float:
        """Seconds of `generate` for one new token."""
        started_s = time.perf_counter()
        self._generate(torch.tensor([tokens]), max_new_tokens=1)
        return time.perf_counter() - started_s

    def fill(self, batch: int, tokens: list[int]) -> None:
        """One sequence computed in chunks, its cache copied."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            for start in range(0, len(tokens), FILL_CHUNK_TOKENS):
                self._model(torch.tensor([tokens[start : start + FILL_CHUNK_TOKENS]]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(batch)
        self._cache, self._context, self._batch = cache, tokens, batch

    def decode(self, steps: list[list[int]]) -> Sequence[float]:
        """Seconds of each step but the first."""
        forced = _ForcedTokens(torch.tensor(steps[1:] + steps[-1:]))
        prompts = torch.cat([torch.tensor([self._context]).expand(self._batch, -1), torch.tensor(steps[0])[:, None]], dim=1)
        self._generate(prompts, max_new_tokens=len(steps), past_key_values=copy.deepcopy(self._cache), forced=forced)
        return [end - start for start, end in zip(forced.called_s, forced.called_s[1:], strict=False)]

    def _generate(
        self, prompts: Tensor, *, max_new_tokens: int, past_key_values: DynamicCache | None = None, forced: "_ForcedTokens | None" = None
    ) -> None:
        settings = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        processors = LogitsProcessorList([forced] if forced is not None else [])
        with torch.inference_mode():
            output = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=settings,
                logits_processor=processors,
                past_key_values=past_key_values,
            )
        assert output.shape[1] == prompts.shape[1] + max_new_tokens


class _ForcedTokens(LogitsProcessor):
    """Leaves one token possible; tokens: [steps, batch]."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self.called_s: list[float] = []

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        tokens = self._tokens[len(self.called_s)]
        self.called_s.append(time.perf_counter())
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


if __name__ == "__main__":
    checkpoint, dtype, experts, threads = sys.argv[1:]
    serve(lambda: TransformersEngine(checkpoint, dtype, experts, int(threads)))
