"""Executes step plans on the model: the only caller of the forward pass in serving.

With several ranks every one of them runs the same plan at the same time. What they compute together is equal on all of them; what is
drawn, the worker's leading rank draws and tells the others. So all make the same drafts, and all meet in the same exchanges.

Several workers of a replica (data parallelism) run plans of their own, equally many and at the same time: they agree which passes over the
experts there are (`lock_step.py`), and who has no rows in one joins it. A worker without any runs empty plans meanwhile.
"""

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from glm_runtime.cache_layout import MLA_KV
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.drafter import Drafter, needs_seed
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.step_sampling import draw, lend_scores, score_prompts, tell_samples
from glm_runtime.model import ForcedChoices, GlmModel
from glm_runtime.mtp import MtpLayer
from glm_runtime.ops.vocab_argmax import Best
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.block_exchange import cache_sharding, exchange_blocks
from glm_runtime.parallel.decode_context import BlockShare
from glm_runtime.parallel.expert_balance import ExpertBalancer
from glm_runtime.parallel.lock_step import LockStep
from glm_runtime.runtime_config import VerificationChoice
from glm_runtime.sampling.rows import Sample
from kv_transfer.errors import EngineFault
from kv_transfer.identity import SequenceId
from kv_transfer.messages import TokenLogprobs


class ModelRunner:
    """The model bound to one pool of blocks. Blocking; called from one thread (the worker's engine thread).

    Made by `GlmRuntime.attach`. `run` may be called while other threads read or write blocks that the plan does not name.
    """

    def __init__(
        self,
        model: GlmModel,
        cache: PagedCache,
        mtp: MtpLayer | None = None,
        verification: VerificationChoice = "exact",
        balancer: ExpertBalancer | None = None,
    ) -> None:
        for group in model.groups:
            group.check_regions([cache.region(MLA_KV, layer) for layer in group.layers])
        self.model = model
        self.cache = cache
        ranks = model.context.decode_context
        self._tables = BlockTables(ranks.size * cache.num_blocks, BlockShare(ranks.rank, ranks.size, cache.block_size_tokens))
        self._verification = verification
        self._balancer = balancer
        self._lock_step = LockStep(model.context.data)
        draws = verification == "ratio"
        self._drafter = Drafter(mtp, cache, self._tables, self._lock_step, draws=draws) if mtp is not None else None

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, store their keys in the cache, and draw the tokens it asks for.

        With an MTP layer its keys are stored for every row that stands, and the drafts of the next step are made. When it returns,
        every store into the plan's blocks is complete. An empty plan returns an empty result. Raises AssertionError for a plan that
        breaks the rules of `SequenceSlice`, EngineFault when a row to sample has logits that are not finite (damaged weights or a
        damaged cache): on all ranks together.

        On ranks that do not lead their worker the result has no log-probabilities. Before anything else the ranks copy the plan's `copies`
        among themselves, so that every row, of this step or a later one, finds them on every rank that has their blocks.
        """
        if plan.copies:
            context = self.model.context
            exchange_blocks(context.worker, cache_sharding(context.layout), self.cache.blocks, plan.copies)
        with torch.inference_mode():
            is_needed, needs_seeds = self._lock_step.anyone(bool(plan.slices), self._drafter is not None and needs_seed(plan))
            if not is_needed:
                return StepResult(step_number=plan.step_number, samples={}, is_idle=True)
            started_at_s = time.perf_counter()
            if self._drafter is not None and needs_seeds:
                plan = self._drafter.seed(plan)
            if not plan.slices:
                return self._join(plan)
            seeded_at_s = time.perf_counter()
            hidden = self.forward(plan)
            logits_of = partial(self._finite_logits, plan)
            drawn: Mapping[SequenceId, tuple[Sample, ...]] = {}
            prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = {}
            if self.model.context.leads:
                proposals = self._drafter.proposals if self._drafter is not None else None
                drawn = draw(plan, hidden, logits_of, self._verification, proposals)
                prompt_logprobs = score_prompts(plan, hidden, logits_of)
            else:
                lend_scores(plan, hidden, logits_of, self._verification)
            samples = tell_samples(plan, drawn, self.model.context.worker)
            drawn_at_s = time.perf_counter()
            drafts = self._drafter.follow(plan, hidden, samples) if self._drafter is not None else {}
            if self._balancer is not None:
                self._balancer.after_step()
            return StepResult(
                step_number=plan.step_number,
                samples=samples,
                logprobs=_told_logprobs(drawn),
                prompt_logprobs=prompt_logprobs,
                drafts=drafts,
                hidden_states=_kept_hidden(plan, hidden),
                num_draft_steps=self._drafter.num_steps if self._drafter is not None else 0,
                target_s=drawn_at_s - seeded_at_s,
                draft_s=time.perf_counter() - drawn_at_s + seeded_at_s - started_at_s,
            )

    def _join(self, plan: StepPlan) -> StepResult:
        """The rest of a step in which only other workers have rows."""
        self.model.join()
        if self._drafter is not None:
            self._drafter.join()
        if self._balancer is not None:
            self._balancer.after_step()
        return StepResult(step_number=plan.step_number, samples={})

    def forward(self, plan: StepPlan, forced: ForcedChoices | None = None) -> Tensor:
        """Compute the plan's rows and store their keys. Returns [rows, hidden], after the final norm, in the plan's order.

        The plan must not be empty. `forced` has one row per row of the plan and is for comparisons with an oracle.
        """
        batch = build_batch(
            plan,
            self.model.config,
            block_size_tokens=self.cache.block_size_tokens,
            num_blocks=self.cache.num_blocks,
            row_tile=self.model.numerics.gemm.row_tile,
            tables=self._tables,
        )
        padded = forced.padded(batch.tokens.shape[0]) if forced is not None else None
        return self.model.forward(batch, self.cache, padded)[: batch.num_rows]

    def _finite_logits(self, plan: StepPlan, hidden: Tensor, is_whole: bool) -> tuple[Tensor, Best]:
        scores = self.model.scores(hidden)
        best = scores.best()
        if not best.is_finite.all():
            raise EngineFault("logits are not finite: the weights or the cache are damaged", step_number=plan.step_number)
        # Ranks that share only rows with the one that draws have nothing to lend it.
        return scores.whole() if is_whole and self.model.context.place.prefill == 0 else scores.own, best


def _told_logprobs(drawn: Mapping[SequenceId, tuple[Sample, ...]]) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
    """Of the samples whose parameters ask for them."""
    return {
        name: tuple([each.logprobs for each in standing if each.logprobs is not None])
        for name, standing in drawn.items()
        if standing[0].logprobs is not None
    }


def _kept_hidden(plan: StepPlan, hidden: Tensor) -> dict[SequenceId, bytes]:
    """Raw bytes of the last row of each slice that asks for them."""
    kept = {}
    end = 0
    for piece in plan.slices:
        end += len(piece.tokens)
        if piece.keeps_hidden:
            kept[piece.sequence_id] = hidden[end - 1].contiguous().view(torch.uint8).numpy().tobytes()
    return kept
