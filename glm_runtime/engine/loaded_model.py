"""A model that is ready to serve: loaded, bound to its pool, and warm.

Knows: the order of loading, and that a first step is slow and must not be a user's. Does not know workers, nor how ranks meet.
"""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from glm_runtime.engine.calibration import MeasuredCosts, measure_costs
from glm_runtime.engine.grammar_desk import load_grammars
from glm_runtime.engine.group_messages import RankTerms
from glm_runtime.engine.request_check import RequestLimits
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.engine.step_runner import StepRunner, run_empty_steps
from glm_runtime.parallel.block_exchange import cache_sharding
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.sampling.grammar import GrammarCompiler
from kv_transfer.block_pool import BlockPool
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_incarnation
from kv_transfer.identity import BlockId, Incarnation, SequenceId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.ranks import FrameLink

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
WORTH_LOGGING_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A worker's model, the bytes of its leading rank's pool and the bookkeeping of all its blocks. Nothing is held.

    max_drafts: most tokens that a step verifies beyond its own; 0 where nothing is drafted. adapts_drafts: fewer while that is faster, by
    what is measured while serving and, before that, by `measured_costs`. min_draft_probability: see `RuntimeConfig`. grammars: None
    where the tokenizer does not serve for constrained output. hidden_state_bytes: of one row's hidden state, which depends on the
    numerics; None where nothing is drafted. numerics, kernels: the mode, and "native" or "torch", as it came out; what peers are told.
    sharding: how the pool's blocks lie on the worker's ranks. rank_links: to the transfers of ranks 1, 2 ...
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
    sharding: CacheSharding = ONE_RANK
    rank_links: tuple[FrameLink, ...] = ()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRank:
    """One rank's part of the model, bound to the rank's own pool."""

    runtime: GlmRuntime
    memory: PoolMemory
    runner: ModelRunner


class RankLead(Protocol):
    """The other ranks of a worker of several, as loading needs them: `GroupLead`."""

    def gather(self) -> ParallelContext:
        """Wait for the other ranks and meet them."""

    def start(self, runner: StepRunner, terms: RankTerms) -> StepRunner:
        """Wait until they are loaded; what is returned runs steps on all ranks."""

    def link_transfers(self) -> tuple[FrameLink, ...]:
        """After `start`: the connections to their transfers, rank 1 first."""


def load_rank(runtime_config: RuntimeConfig, context: ParallelContext, incarnation: Incarnation) -> LoadedRank:
    """Load one rank's part of the checkpoint and map its pool with the rank's probe pattern. Takes seconds to minutes.

    incarnation: of the worker, the same on all its ranks.
    Raises ConfigError as `GlmRuntime.load` does.
    """
    runtime = GlmRuntime.load(runtime_config, LoggedLoading().report, context)
    memory = PoolMemory(runtime.num_blocks, runtime.layout.block_bytes)
    memory.write_probe(rank_incarnation(incarnation, context.worker.rank))
    return LoadedRank(runtime=runtime, memory=memory, runner=runtime.attach(memory))


def load_model(
    runtime_config: RuntimeConfig, incarnation: Incarnation, *, drafts_here: bool = True, lead: RankLead | None = None
) -> LoadedModel:
    """Load the checkpoint, map the pool, and run first steps: on all ranks, where there are several. Takes seconds to minutes.

    drafts_here: whether drafts will be made on this worker, and are worth measuring; prefill workers only store the layer's keys.
    lead: of the worker's other ranks, None where there are none. Raises as `GlmRuntime.load` and the lead's methods do.
    """
    context = one_rank() if lead is None else lead.gather()
    rank = load_rank(runtime_config, context, incarnation)
    runtime = rank.runtime
    runner: StepRunner = rank.runner if lead is None else lead.start(rank.runner, rank_terms(runtime))
    rank_links = () if lead is None else lead.link_transfers()
    sharding = cache_sharding(context.layout)
    num_blocks = runtime.num_blocks * sharding.num_homes
    _warm_up(runner)
    measured_costs = _measure(runner, runtime, num_blocks) if drafts_here else MeasuredCosts()
    run_empty_steps(runner)  # other workers of the replica may have more to measure
    block_size_tokens = runtime.layout.block_size_tokens
    return LoadedModel(
        runner=runner,
        layout=runtime.layout,
        weights_version=runtime.weights_version,
        memory=rank.memory,
        pool=BlockPool(num_blocks, block_size_tokens, sharding.num_homes),
        request_limits=RequestLimits(
            vocab_size=runtime.config.vocab_size,
            max_model_len_tokens=runtime.max_model_len_tokens,
            capacity_tokens=num_blocks * block_size_tokens,
        ),
        max_step_tokens=runtime_config.max_step_tokens,
        max_drafts=runtime.max_drafts,
        adapts_drafts=runtime_config.adapts_drafts,
        min_draft_probability=runtime_config.min_draft_probability,
        measured_costs=measured_costs,
        grammars=load_grammars(runtime_config.checkpoint, runtime.config),
        hidden_state_bytes=runtime.hidden_state_bytes,
        numerics=runtime.model.numerics.mode,
        kernels=_kernels(runtime),
        sharding=sharding,
        rank_links=rank_links,
    )


def rank_terms(runtime: GlmRuntime) -> RankTerms:
    """What must be equal on all ranks of a worker."""
    return RankTerms(
        weights_version=runtime.weights_version,
        layout_fingerprint=runtime.layout.fingerprint,
        numerics=runtime.model.numerics.mode,
        kernels=_kernels(runtime),
        num_blocks=runtime.num_blocks,
        max_step_tokens=runtime.runtime_config.max_step_tokens,
        max_model_len_tokens=runtime.max_model_len_tokens,
        max_drafts=runtime.max_drafts,
        verification=runtime.runtime_config.verification,
        num_balance_steps=runtime.runtime_config.num_balance_steps,
    )


def _kernels(runtime: GlmRuntime) -> str:
    return "native" if runtime.model.numerics.impl == "native" else "torch"


def _measure(runner: StepRunner, runtime: GlmRuntime, num_blocks: int) -> MeasuredCosts:
    if not runtime.max_drafts or not runtime.runtime_config.adapts_drafts:
        return MeasuredCosts()
    costs = measure_costs(
        runner,
        num_blocks=num_blocks,
        max_step_tokens=runtime.runtime_config.max_step_tokens,
        num_homes=runtime.num_homes,
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
