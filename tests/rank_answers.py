"""The runtime on several ranks of the pool, and how far its answers must be those of one rank.

Sums over ranks round in another order than one rank's, so where two tokens are almost equally good the ranks may take the other one, and
what follows has another context: answers are compared up to there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm_runtime.engine.offline import generate
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.sampling.noise import noise_words
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

MARGIN = 1e-4
"""Least difference of the two best log-probabilities, over temperature and with noise where there is, up to which ranks may differ."""
MOST_LEFT_OUT = 0.05
"""Share of the tokens that may lie behind such a place; more would be no comparison."""

Answers = tuple[list[list[int]], list[list[float]]]
"""Tokens of each prompt, and how much better each was than the second best."""

_LOADED: dict[str, tuple[ParallelContext, GlmRuntime]] = {}
"""Of this process, by configuration; a context that is not the pool's any more has its runtime loaded again."""


def load_rank(context: ParallelContext, config: RuntimeConfig) -> GlmRuntime:
    """The runtime of this rank; `config.parallel` is the context's."""
    key = repr(config)
    if key not in _LOADED or _LOADED[key][0] is not context:
        _LOADED[key] = (context, GlmRuntime.load(dataclasses.replace(config, parallel=context.layout), context=context))
    return _LOADED[key][1]


def generate_on(
    context: ParallelContext,
    config: RuntimeConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
    options: Mapping[str, Any],
) -> list[list[int]]:
    """`offline.generate` as every rank runs it."""
    return generate(load_rank(context, config), prompts, sampling, **options)


def config_of(checkpoint: Path, **choices: Any) -> RuntimeConfig:
    """Small pool, one thread."""
    return RuntimeConfig(checkpoint=checkpoint, num_threads=1, cache_bytes=64 << 20, **choices)


def assert_answers(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], margins: Sequence[Sequence[float]]) -> float:
    """Compare each answer up to the first place without a margin. Returns the share of tokens behind such places."""
    num_compared = 0
    for number, (answer, right, gaps) in enumerate(zip(found, expected, margins, strict=True)):
        limit = next((place for place, gap in enumerate(gaps) if gap < MARGIN), len(right))
        num_compared += limit
        assert list(answer[:limit]) == list(right[:limit]), f"answer {number} differs before place {limit}, where the first tie is"
    left_out = 1.0 - num_compared / sum(map(len, expected))
    assert left_out <= MOST_LEFT_OUT, f"{left_out:.0%} of the tokens are not compared"
    return left_out


def margins_of(
    runtime: GlmRuntime, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], sampling: SamplingParameters
) -> list[list[float]]:
    """How much better the best token was than the second, at each place of each answer, by one forward of one rank over all of it."""
    return [_margins(runtime, prompt, answer, sampling) for prompt, answer in zip(prompts, answers, strict=True)]


def _margins(runtime: GlmRuntime, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParameters) -> list[float]:
    tokens = [*prompt, *answer[:-1]]
    block_size_tokens = runtime.layout.block_size_tokens
    num_blocks = -(-len(tokens) // block_size_tokens)
    runner = runtime.attach(PoolMemory(num_blocks, runtime.layout.block_bytes))
    piece = SequenceSlice(
        sequence_id=SequenceId("whole"), tokens=tokens, start=0, block_table=[BlockId(block) for block in range(num_blocks)]
    )
    with torch.inference_mode():
        hidden = runner.forward(StepPlan(step_number=0, slices=(piece,)))[len(prompt) - 1 :]
        scores = runtime.model.logits(hidden).double().log_softmax(-1).numpy()
    if sampling.temperature > 0.0:
        scores = scores / sampling.temperature + _noise(sampling.seed, *scores.shape)
    two = np.sort(scores, axis=-1)[:, -2:]
    return [float(gap) for gap in two[:, 1] - two[:, 0]]


def _noise(seed: int, num_tokens: int, vocabulary: int) -> np.ndarray[Any, Any]:
    """What the sampler adds for output token 0, 1 ... (`sampling/sampler.py`)."""
    ids = np.arange(vocabulary, dtype=np.uint64)
    words = [
        noise_words(np.full(vocabulary, seed, dtype=np.uint64), np.full(vocabulary, index, dtype=np.uint64), ids)
        for index in range(num_tokens)
    ]
    return -np.log(-np.log((np.stack(words).astype(np.float64) + 0.5) * 2.0**-32))


def one_rank_answers(config: RuntimeConfig, prompts: Sequence[Sequence[int]], sampling: SamplingParameters) -> Answers:
    """What one rank says, without drafts, and its margins."""
    runtime = GlmRuntime.load(dataclasses.replace(config, parallel=ParallelLayout()))
    answers = generate(runtime, prompts, sampling, max_drafts=0)
    return answers, margins_of(runtime, prompts, answers, sampling)
