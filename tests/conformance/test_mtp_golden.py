"""The MTP layer against `mtp_golden.json` beside the shipped checkpoint: an independent implementation's drafts, by position."""

import json
from typing import Any

import pytest
import torch

from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import TINY

CASES: list[dict[str, Any]] = json.loads((TINY / "mtp_golden.json").read_text(encoding="utf-8"))
MIN_MARGIN = 1e-3
"""Between the two best logits; below it rounding may decide. From the checkpoint's README."""
NAME = SequenceId("golden")
GREEDY = SamplingParameters(max_tokens=64, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def runtime() -> GlmRuntime:
    return GlmRuntime.load(RuntimeConfig(checkpoint=TINY, cache_format="fp32", num_threads=1))


@pytest.fixture(scope="module")
def runner(runtime: GlmRuntime) -> ModelRunner:
    return runtime.attach(PoolMemory(16, runtime.layout.block_bytes))


def compute(runner: ModelRunner, ids: list[int], chunk_tokens: int) -> StepResult:
    """The prompt in chunks, and five drafts after its last."""
    for start in range(0, len(ids), chunk_tokens):
        end = min(start + chunk_tokens, len(ids))
        is_last = end == len(ids)
        piece = SequenceSlice(
            sequence_id=NAME,
            tokens=ids[start:end],
            start=start,
            block_table=[BlockId(block) for block in range(16)],
            sampling=GREEDY if is_last else None,
            next_token=None if is_last else ids[end],
            num_next_drafts=5,
        )
        result = runner.run(StepPlan(step_number=0, slices=(piece,)))
    return result


@pytest.mark.parametrize("chunk_tokens", [1024, 37])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_next_token_and_drafts(runner: ModelRunner, number: int, chunk_tokens: int) -> None:
    case = CASES[number]
    result = compute(runner, case["ids"], chunk_tokens)
    assert result.samples[NAME] == (case["next"],) or case["next_margin"] < MIN_MARGIN
    for draft, expected, margin in zip(result.drafts[NAME], case["drafts"], case["draft_margins"], strict=True):
        if margin < MIN_MARGIN:
            break  # what follows was drafted from another token
        assert draft == expected


@pytest.mark.parametrize("number", range(0, len(CASES), 3))
def test_step_0_of_every_row(runtime: GlmRuntime, runner: ModelRunner, number: int) -> None:
    """Also at position 0, whose embedding is left out, and where lists are shorter than the context."""
    case = CASES[number]
    assert runtime.mtp is not None
    with torch.inference_mode():
        hidden = runner.forward(StepPlan(step_number=0, slices=(piece_of(case["ids"]),)))
        batch = build_batch(
            StepPlan(step_number=0, slices=(piece_of([*case["ids"][1:], case["next"]]),)),
            runtime.config,
            block_size_tokens=64,
            num_blocks=16,
            row_tile=1,
        )
        recycled, _ = runtime.mtp.forward(hidden, batch, runner.cache)
        guesses = runtime.model.logits(recycled).argmax(-1).tolist()
    wrong = [
        row
        for row, (guess, expected, margin) in enumerate(zip(guesses, case["step0_argmax"], case["step0_margins"], strict=True))
        if guess != expected and margin >= MIN_MARGIN
    ]
    assert not wrong


def test_the_first_position_sees_no_embedding(runtime: GlmRuntime, runner: ModelRunner) -> None:
    assert runtime.mtp is not None
    hidden = torch.randn(2, runtime.config.hidden_size, generator=torch.Generator().manual_seed(1))
    seen = []
    for tokens in ([5, 7], [6, 7]):
        plan = StepPlan(step_number=0, slices=(piece_of(tokens),))
        batch = build_batch(plan, runtime.config, block_size_tokens=64, num_blocks=16, row_tile=1)
        with torch.inference_mode():
            seen.append(runtime.mtp.forward(hidden, batch, runner.cache)[0])
    assert torch.equal(*seen)


def piece_of(tokens: list[int]) -> SequenceSlice:
    return SequenceSlice(sequence_id=NAME, tokens=tokens, start=0, block_table=[BlockId(block) for block in range(16)])
