"""The multi-token-prediction layer: from a row's hidden state and the token after it, a guess at the token after that.

u = W_eh [RMS_e(emb(t_{P+1})) | RMS_h(h_P)]; u -> one full decoder layer at position P -> m = RMS(.); draft = argmax(head(m)).
h_P is the target's hidden state *after* its final norm, and so is the m that the next draft step takes for it. Embedding, head and
rotary table are the target's. Step 0 computes all rows of a target step and stores their keys; steps 1 .. k - 1 compute one row a
sequence, each one position further, and attend to the list that step 0 chose for its last row.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.cache_layout import MTP_INDEX_K, MTP_MLA_KV
from glm_runtime.index_group import Selection, build_mtp_groups
from glm_runtime.model import DecoderLayer, ForcedChoices, GlmModel, build_layer
from glm_runtime.ops.add_rms_norm import add_rms_norm
from glm_runtime.ops.embed_eh_norm import EhNorms, embed_eh_norm
from glm_runtime.ops.vocab_argmax import vocab_argmax
from glm_runtime.paged_cache import PagedCache
from glm_runtime.step_batch import StepBatch
from glm_runtime.weights import MtpWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayer:
    """The MTP layer beside its target. Holds nothing between steps but its index group's buffers."""

    target: GlmModel
    weights: MtpWeights
    layer: DecoderLayer

    def forward(self, hidden: Tensor, batch: StepBatch, cache: PagedCache, selection: Selection | None = None) -> tuple[Tensor, Selection]:
        """One draft step over the rows of `batch`, whose tokens are those *after* the rows' positions.

        hidden: [T, hidden], of the rows' positions, after the norm that made it. selection: None lets the layer's own indexer choose
        and stores index keys (step 0). Returns m [T, hidden], new, and the selection.
        """
        target, eps = self.target, self.target.config.rms_norm_eps
        impl = target.numerics.impl
        norms = EhNorms(self.weights.embedding_norm, self.weights.hidden_norm, eps)
        halves = embed_eh_norm(batch.tokens, batch.positions, hidden, target.weights.embedding, norms, impl=impl)
        x = target.numerics.gemm.linear(halves, self.weights.projection)
        rope = target.rope.at(batch.positions)
        residual, owed, selection = self.layer.forward(x, (), rope, batch, cache, selection, ForcedChoices())
        return add_rms_norm(residual, owed, self.weights.final_norm, eps, impl=impl)[1], selection

    def draft(self, recycled: Tensor, batch: StepBatch, selection: Selection, rows: Tensor, num_drafts: int, cache: PagedCache) -> Tensor:
        """The drafts of step 0 and of `num_drafts - 1` further steps: [R, num_drafts] int64.

        recycled, batch, selection: of step 0. rows: [R] int64, the last accepted row of each sequence that drafts.
        The further steps store nothing: the lists end at the last accepted row, so nobody would read what they store before the next
        step 0 overwrites it.
        """
        hidden = recycled.index_select(0, rows)
        drafts = [self._guess(hidden)]
        if num_drafts > 1:
            region = cache.region(MTP_MLA_KV, self.layer.attention.layer)
            step = _one_row_each(batch, rows)
            chosen = self.layer.attention.group.compact(selection.lists, rows, step, region, self.target.numerics.impl)
            first, last = step.positions, self.target.rope.cos.shape[0] - 1
            for number in range(1, num_drafts):
                # A draft beyond the longest sequence is never verified; it only must have a position.
                positions = (first + number).clamp_max(last)
                hidden, _ = self.forward(hidden, dataclasses.replace(step, tokens=drafts[-1], positions=positions), cache, chosen)
                drafts.append(self._guess(hidden))
        return torch.stack(drafts, dim=1)

    def _guess(self, hidden: Tensor) -> Tensor:
        return vocab_argmax(self.target.logits(hidden), impl=self.target.numerics.impl).ids


def build_mtp(target: GlmModel, weights: MtpWeights, max_step_tokens: int | None = None) -> MtpLayer:
    """The MTP layer of a model: an index group of its own, with components of its own in the cache."""
    (group,) = build_mtp_groups(target.config, max_step_tokens)
    layer = build_layer(target.config, weights.layer, target.numerics, group.leader, group, MTP_MLA_KV, MTP_INDEX_K)
    return MtpLayer(target=target, weights=weights, layer=layer)


def _one_row_each(batch: StepBatch, rows: Tensor) -> StepBatch:
    """Draft steps after step 0, at the positions of `rows`: nothing is stored, and what is attended to has been chosen."""
    count = rows.shape[0]
    positions = batch.positions.index_select(0, rows)
    return StepBatch(
        tokens=torch.zeros_like(positions),
        positions=positions,
        slots=torch.full_like(positions, -1),
        row_sequences=torch.arange(count),
        visible=positions + 1,
        block_tables=batch.block_tables.index_select(0, batch.row_sequences.index_select(0, rows)),
        spans=(),
        scored=(),
        num_rows=count,
        max_visible=batch.max_visible,
    )
