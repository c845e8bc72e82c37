"""Executes step plans on the model: the only caller of the forward pass in serving."""

import torch
from torch import Tensor

from glm_runtime.cache_layout import MLA_KV
from glm_runtime.engine.batch_builder import build_batch
from glm_runtime.engine.block_tables import BlockTables
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.model import ForcedChoices, GlmModel
from glm_runtime.ops.vocab_argmax import vocab_argmax
from glm_runtime.paged_cache import PagedCache
from glm_runtime.sampling.sampler import sample
from kv_transfer.errors import EngineFault
from kv_transfer.identity import SequenceId


class ModelRunner:
    """The model bound to one pool of blocks. Blocking; called from one thread (the worker's engine thread).

    Made by `GlmRuntime.attach`. `run` may be called while other threads read or write blocks that the plan does not name.
    """

    def __init__(self, model: GlmModel, cache: PagedCache) -> None:
        for group in model.groups:
            group.check_regions([cache.region(MLA_KV, layer) for layer in group.layers])
        self.model = model
        self.cache = cache
        self._tables = BlockTables(cache.num_blocks)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, store their keys in the cache, and draw the tokens it asks for.

        When it returns, every store into the plan's blocks is complete. An empty plan returns an empty result. Raises
        AssertionError for a plan that breaks the rules of `SequenceSlice`, EngineFault when a row to sample has logits that are
        not finite (damaged weights or a damaged cache).
        """
        if not plan.slices:
            return StepResult(step_number=plan.step_number, samples={})
        with torch.inference_mode():
            hidden = self.forward(plan)
            return StepResult(step_number=plan.step_number, samples=self._sample(plan, hidden))

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

    def _sample(self, plan: StepPlan, hidden: Tensor) -> dict[SequenceId, int]:
        rows, asking = [], []
        end = 0
        for piece in plan.slices:
            end += len(piece.tokens)
            if piece.sampling is not None:
                rows.append(end - 1)
                asking.append((piece.sequence_id, piece.sampling, piece.token_index))
        if not rows:
            return {}
        logits = self.model.logits(hidden if len(rows) == len(hidden) else hidden.index_select(0, torch.tensor(rows)))
        best = vocab_argmax(logits, impl=self.model.numerics.impl)
        if not best.is_finite.all():
            raise EngineFault("logits are not finite: the weights or the cache are damaged", step_number=plan.step_number)
        tokens = sample(logits, [sampling for _, sampling, _ in asking], [index for _, _, index in asking], best)
        return {sequence_id: token for (sequence_id, _, _), token in zip(asking, tokens, strict=True)}
