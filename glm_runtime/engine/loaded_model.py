"""A model that is ready to serve: loaded, bound to its pool, and warm.

Knows: the order of loading, and that a first step is slow and must not be a user's. Does not know workers.
"""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from glm_runtime.engine.calibration import MeasuredCosts, measure_costs
from glm_runtime.engine.grammar_desk import load_grammars
from glm_runtime.engine.request_check import RequestLimits
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.sampling.grammar import GrammarCompiler
from kv_transfer.block_pool import BlockPool
from kv_transfer.identity import BlockId, Incarnation, SequenceId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
WORTH_LOGGING_BYTES = 256 << 20


class StepRunner(Protocol):
    """What a worker asks of a model: `ModelRunner`, or a toy in tests."""

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """One rank's model, the bytes of its pool and their bookkeeping. Everything is empty, and nothing is held.

    max_drafts: most tokens that a step verifies beyond its own; 0 where nothing is drafted. adapts_drafts: fewer while that is faster, by
    what is measured while serving and, before that, by `measured_costs`. min_draft_probability: see `RuntimeConfig`. grammars: None
    where the tokenizer does not serve for constrained output. hidden_state_bytes: of one row's hidden state, which depends on the
    numerics; None where nothing is drafted. numerics, kernels: the mode, and "native" or "torch", as it came out; what peers are told.
    """

    runner: StepRunner
    layout: CacheLayout
    weights_version: str
    memory: PoolMemory
    pool: BlockPool
    request_limits: RequestLimits
    max_step_tokens: int
    max_drafts: int = 0
    adapts_drafts: bool = False
    min_draft_probability: float | None = None
    measured_costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    grammars: GrammarCompiler | None = None
    hidden_state_bytes: int | None = None
    numerics: str = ""
    kernels: str = ""


class LoggedLoading:
    """Writes every tenth of a long load to the log, so that a start that takes minutes is seen to move."""

    def __init__(self) -> None:
        self._tenths_logged = 0

    def report(self, bytes_read: int, bytes_total: int) -> None:
        """A `LoadProgress`. Small checkpoints are not worth a line."""
        tenths = 10 * bytes_read // max(bytes_total, 1)
        if bytes_total >= WORTH_LOGGING_BYTES and tenths > self._tenths_logged:
            self._tenths_logged = tenths
            logger.info("loading weights percent=%d read_mib=%d total_mib=%d", 10 * tenths, bytes_read >> 20, bytes_total >> 20)


def load_model(runtime_config: RuntimeConfig, incarnation: Incarnation, *, drafts_here: bool = True) -> LoadedModel:
    """Load the checkpoint, map the pool with the incarnation's probe pattern, and run a first step. Takes seconds to minutes.

    drafts_here: whether drafts will be made on this worker, and are worth measuring; prefill workers only store the layer's keys.
    Raises ConfigError as `GlmRuntime.load` does.
    """
    runtime = GlmRuntime.load(runtime_config, LoggedLoading().report)
    memory = PoolMemory(runtime.num_blocks, runtime.layout.block_bytes)
    memory.write_probe(incarnation)
    runner = runtime.attach(memory)
    _warm_up(runner)
    block_size_tokens = runtime.layout.block_size_tokens
    return LoadedModel(
        runner=runner,
        layout=runtime.layout,
        weights_version=runtime.weights_version,
        memory=memory,
        pool=BlockPool(runtime.num_blocks, block_size_tokens),
        request_limits=RequestLimits(
            vocab_size=runtime.config.vocab_size,
            max_model_len_tokens=runtime.max_model_len_tokens,
            capacity_tokens=runtime.num_blocks * block_size_tokens,
        ),
        max_step_tokens=runtime_config.max_step_tokens,
        max_drafts=runtime.max_drafts,
        adapts_drafts=runtime_config.adapts_drafts,
        min_draft_probability=runtime_config.min_draft_probability,
        measured_costs=_measure(runner, runtime) if drafts_here else MeasuredCosts(),
        grammars=load_grammars(runtime_config.checkpoint, runtime.config),
        hidden_state_bytes=runtime.hidden_state_bytes,
        numerics=runtime.model.numerics.mode,
        kernels="native" if runtime.model.numerics.impl == "native" else "torch",
    )


def _measure(runner: StepRunner, runtime: GlmRuntime) -> MeasuredCosts:
    if not runtime.max_drafts or not runtime.runtime_config.adapts_drafts:
        return MeasuredCosts()
    costs = measure_costs(
        runner,
        num_blocks=runtime.num_blocks,
        max_step_tokens=runtime.runtime_config.max_step_tokens,
    )
    in_ms = [
        f"{size}:{1e3 * costs.target[size]:.2f}+{1e3 * costs.first[size]:.2f}+{1e3 * costs.further[size]:.2f}" for size in costs.target
    ]
    logger.info("steps measured rows:target_ms+first_draft_ms+further_draft_ms %s", " ".join(in_ms))
    return costs


def _warm_up(runner: StepRunner) -> None:
    """A chunk and a decode row over block 0, before anybody owns it; what they leave there is overwritten before it is read."""
    sampling = SamplingParameters(max_tokens=2, seed=0)
    for start, tokens in ((0, [0] * WARM_UP_TOKENS), (WARM_UP_TOKENS, [0])):
        piece = SequenceSlice(sequence_id=SequenceId("warm-up"), tokens=tokens, start=start, block_table=[BlockId(0)], sampling=sampling)
        runner.run(StepPlan(step_number=0, slices=(piece,)))
