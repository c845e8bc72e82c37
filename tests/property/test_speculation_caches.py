"""Whatever is drafted and accepted, the caches are those of a run that never speculated, byte by byte, at every valid position.

The real model on the shipped checkpoint; drafts are the true continuation with faults at random places, so any run of rows may be
rejected at any place of a block, and several sequences share a step.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from tests.glm_checkpoints import CACHE_CHOICES, TINY
from tests.prompts import make_prompt

BLOCK = 64
NUM_TOKENS = 40
BLOCKS_EACH = 4
LENGTHS = (50, 64, 100)
SAMPLING = SamplingParameters(max_tokens=200, seed=4, temperature=0.6)


@dataclass
class Sequence:
    """One prompt and what followed it; everything below `num_stored` is valid."""

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    num_stored: int = 0
    drafts: tuple[int, ...] = ()
    made: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def block_table(self) -> list[BlockId]:
        return [BlockId(self.number * BLOCKS_EACH + block) for block in range(BLOCKS_EACH)]

    def piece(self, num_drafts: int, num_next_drafts: int, chunk_tokens: int) -> SequenceSlice:
        end = min(self.num_stored + chunk_tokens, len(self.tokens))
        is_whole = end == len(self.tokens)
        drafts = self.drafts[:num_drafts] if is_whole else ()
        return SequenceSlice(
            sequence_id=SequenceId(str(self.number)),
            tokens=[*self.tokens[self.num_stored : end], *drafts],
            start=self.num_stored,
            block_table=self.block_table,
            sampling=SAMPLING if is_whole else None,
            token_index=len(self.tokens) - self.num_prompt_tokens,
            num_drafts=len(drafts),
            next_token=None if is_whole else self.tokens[end],
            num_next_drafts=num_next_drafts,
        )


class Run:
    """Some sequences on one pool."""

    def __init__(self, runtime: GlmRuntime) -> None:
        self.memory = PoolMemory(BLOCKS_EACH * len(LENGTHS), runtime.layout.block_bytes)
        self.memory.buffer[:] = b"\xff" * len(self.memory.buffer)
        self.runner: ModelRunner = runtime.attach(self.memory)
        self.sequences = [Sequence(number, make_prompt(length, number), length) for number, length in enumerate(LENGTHS)]

    def step(self, pieces: list[tuple[Sequence, SequenceSlice]]) -> None:
        result = self.runner.run(StepPlan(step_number=0, slices=tuple(piece for _, piece in pieces)))
        for sequence, piece in pieces:
            run = result.samples.get(piece.sequence_id, ())
            sequence.num_stored = piece.start + piece.num_given + max(len(run) - 1, 0)
            sequence.tokens += run
            sequence.made.append(result.drafts.get(piece.sequence_id, ()))


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp8_ds_mla+mxfp4", marks=pytest.mark.slow)])
def runtime(request: pytest.FixtureRequest) -> GlmRuntime:
    return GlmRuntime.load(RuntimeConfig(checkpoint=TINY, num_threads=1, **CACHE_CHOICES[request.param]))


class Bench:
    """A runtime and the calm run. Its repr is short: hypothesis shows it with a failure."""

    def __init__(self, runtime: GlmRuntime) -> None:
        self.runtime = runtime
        self.calm = calm_run(runtime)

    def __repr__(self) -> str:
        return f"Bench({self.runtime.formats.main})"


@pytest.fixture(scope="module")
def bench(runtime: GlmRuntime) -> Bench:
    return Bench(runtime)


def calm_run(runtime: GlmRuntime) -> Run:
    """One token at a time, each sequence by itself."""
    run = Run(runtime)
    for sequence in run.sequences:
        while len(sequence.tokens) < sequence.num_prompt_tokens + NUM_TOKENS:
            run.step([(sequence, sequence.piece(0, 0, 1024))])
    return run


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_caches_equal_a_run_that_never_speculated(bench: Bench, seed: int) -> None:
    runtime, calm, rng = bench.runtime, bench.calm, np.random.default_rng(seed)
    run = Run(runtime)
    while any(len(sequence.tokens) < sequence.num_prompt_tokens + NUM_TOKENS - 9 for sequence in run.sequences):
        pieces = []
        for sequence, quiet in zip(run.sequences, calm.sequences, strict=True):
            if len(sequence.tokens) < sequence.num_prompt_tokens + NUM_TOKENS - 9 and rng.random() < 0.8:
                true = quiet.tokens[len(sequence.tokens) : len(sequence.tokens) + 8]
                sequence.drafts = tuple(token if rng.random() < 0.8 else int(rng.integers(2000)) for token in true)
                pieces.append((sequence, sequence.piece(int(rng.integers(0, 9)), int(rng.integers(0, 6)), int(rng.choice([7, 64, 1024])))))
        if pieces:
            run.step(pieces)
    for sequence, quiet in zip(run.sequences, calm.sequences, strict=True):
        assert sequence.tokens == quiet.tokens[: len(sequence.tokens)]
        for component, layer, plane, position in differing(runtime, run, calm, sequence):
            raise AssertionError(f"sequence {sequence.number}: {component} of layer {layer}, plane {plane}, position {position} differs")


def differing(runtime: GlmRuntime, run: Run, calm: Run, sequence: Sequence) -> list[tuple[str, int, int, int]]:
    """(component, layer, plane, position) of the first row of each region that is not the calm run's."""
    found = []
    for region in runtime.layout.regions:
        mine, theirs = (each.runner.cache.region(region.component, region.layer).planes for each in (run, calm))
        for number, (plane, expected) in enumerate(zip(mine, theirs, strict=True)):
            table = list(sequence.block_table)
            is_other = (plane[table] != expected[table]).flatten(0, 1).any(-1)[: sequence.num_stored]
            if is_other.any():
                found.append((region.component, region.layer, number, int(is_other.nonzero()[0, 0])))
    return found
