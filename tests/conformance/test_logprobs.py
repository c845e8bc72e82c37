"""Log-probabilities: those of transformers within the tolerance of its logits, and the same bits however a token was reached."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters, TokenLogprobs
from kv_transfer.pool_memory import PoolMemory
from tests.conformance.glm_oracle import Oracle
from tests.conformance.test_oracle import heldout_prompts
from tests.conformance.tolerances import LOGITS_OF_LARGEST
from tests.glm_checkpoints import TINY
from tests.prompts import make_prompt

NUM_TOP = 5


@dataclass
class Told:
    """What one sequence was told."""

    prompt: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    output: list[TokenLogprobs] = field(default_factory=list)


@pytest.fixture(scope="module")
def runtime() -> GlmRuntime:
    torch.set_num_threads(1)
    return GlmRuntime.load(RuntimeConfig(checkpoint=TINY, cache_format="fp32", num_threads=1, max_drafts=0))


@pytest.fixture(scope="module")
def runner(runtime: GlmRuntime) -> ModelRunner:
    return runtime.attach(PoolMemory(8, runtime.layout.block_bytes))


def tell(runner: ModelRunner, prompt: Sequence[int], chunk: int, max_tokens: int = 1) -> Told:
    """Greedy, on blocks 0 to 7: log-probabilities of the prompt, in chunks, and of the answer."""
    told = Told()
    sampling = SamplingParameters(max_tokens=max_tokens, seed=0, temperature=0.0, logprobs=NUM_TOP)
    known, start = list(prompt), 0
    while len(told.tokens) < max_tokens:
        end = min(start + chunk, len(known))
        piece = SequenceSlice(
            sequence_id=SequenceId("a"),
            tokens=known[start:end],
            start=start,
            block_table=[BlockId(number) for number in range(8)],
            sampling=sampling if end == len(known) else None,
            token_index=len(told.tokens),
            following=list(prompt[start + 1 : end + 1]),
            num_prompt_logprobs=NUM_TOP,
        )
        result = runner.run(StepPlan(step_number=0, slices=(piece,)))
        told.prompt += result.prompt_logprobs.get(SequenceId("a"), ())
        if piece.sampling is not None:
            (token,) = result.samples[SequenceId("a")]
            told.tokens.append(token)
            told.output += result.logprobs[SequenceId("a")]
            known.append(token)
        start = end
    return told


@pytest.mark.parametrize("chunk", [1000, 37])
def test_a_scored_prompt_is_what_transformers_computes(runner: ModelRunner, chunk: int) -> None:
    prompt = next(text for text in heldout_prompts() if len(text) >= 200)[:200]
    logits = Oracle(TINY, has_exact_angles=True).run(prompt).logits
    expected = torch.log_softmax(logits.double(), -1)
    told = tell(runner, prompt, chunk).prompt
    assert len(told) == len(prompt) - 1
    for place, one in enumerate(told):
        # A logit may be off by so much, and the normaliser by as much again; the sum is then rounded to fp32.
        margin = 2 * LOGITS_OF_LARGEST * float(logits[place].abs().max()) + 1e-6
        assert abs(one.logprob - float(expected[place, prompt[place + 1]])) <= margin
        for token, value in one.top:
            assert abs(value - float(expected[place, token])) <= margin
        assert one.top[-1][1] >= float(expected[place].topk(NUM_TOP + 1).values[-1]) - margin, "nothing larger was left out"
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)


def test_a_token_is_told_the_same_when_it_is_drawn_and_when_it_is_read(runner: ModelRunner) -> None:
    prompt = make_prompt(70, 3)
    drawn = tell(runner, prompt, 1000, max_tokens=12)
    read = tell(runner, [*prompt, *drawn.tokens], 33)
    assert read.prompt[: len(prompt) - 1] == drawn.prompt
    assert read.prompt[len(prompt) - 1 :] == drawn.output, "bit by bit: the model's rows do not depend on their step"
    assert [one.top[0][0] for one in drawn.output] == drawn.tokens
    assert all(one.rank == 1 for one in drawn.output)
