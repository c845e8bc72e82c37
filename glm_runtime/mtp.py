"""The multi-token-prediction layer: from a row's hidden state and the token after it, a guess at the token after that.

u = W_eh [RMS_e(emb(t_{P+1})) | RMS_h(h_P)]; u -> one full decoder layer at position P -> m = RMS(.); draft = argmax(head(m)).
h_P is the target's hidden state *after* its final norm, and so is the m that the next draft step takes for it. Embedding, head and
rotary table are the target's. Step 0 computes all rows of a target step and stores their keys; steps 1 .. k - 1 compute one row a
sequence, each one position further, and attend to the list that step 0 chose for its last row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.cache_layout import MTP_INDEX_K, MTP_MLA_KV
from glm_runtime.config import GlmConfig
from glm_runtime.index_group import IndexGroup, Selection
from glm_runtime.model import DecoderLayer, ForcedChoices, GlmModel, build_layer
from glm_runtime.norm import rms_norm
from glm_runtime.paged_cache import PagedCache
from glm_runtime.runtime_config import RuntimeConfig
from glm_runtime.step_batch import StepBatch
from glm_runtime.weights import MtpWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayer:
    """The MTP layer beside its target. Holds no state between steps."""

    target: GlmModel
    weights: MtpWeights
    layer: DecoderLayer

    def forward(self, hidden: Tensor, batch: StepBatch, cache: PagedCache, selection: Selection | None = None) -> tuple[Tensor, Selection]:
        """One draft step over the rows of `batch`, whose tokens are those *after* the rows' positions.

        hidden: [T, hidden], of the rows' positions, after the norm that made it. selection: None lets the layer's own indexer choose
        and stores index keys (step 0). Returns m [T, hidden], new, and the selection.
        """
        gemm, eps = self.target.numerics.gemm, self.target.config.rms_norm_eps
        embedded = self.target.weights.embedding.index_select(0, batch.tokens)
        # The layer was trained with nothing in the embedding's place at position 0.
        embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0.0)
        halves = (rms_norm(embedded, self.weights.embedding_norm, eps), rms_norm(hidden, self.weights.hidden_norm, eps))
        x = gemm.linear(torch.cat(halves, dim=-1), self.weights.projection)
        x, selection = self.layer.forward(x, self.target.rope.at(batch.positions), batch, cache, selection, ForcedChoices())
        return rms_norm(x, self.weights.final_norm, eps), selection

    def draft(self, recycled: Tensor, positions: Tensor, selection: Selection, cache: PagedCache, num_drafts: int) -> Tensor:
        """The drafts of step 0 and of `num_drafts - 1` further steps: [R, num_drafts] int64.

        recycled: [R, hidden], m of step 0 at each sequence's last accepted row; positions: [R], of those rows; selection: theirs.
        The further steps store nothing: the list ends at the last accepted row, so nobody would read what they store before the next
        step 0 overwrites it.
        """
        drafts = [self._argmax(recycled)]
        last = self.target.rope.cos.shape[0] - 1
        for step in range(1, num_drafts):
            # A draft beyond the longest sequence is never verified; it only must have a position.
            batch = _one_row_each(drafts[-1], (positions + step).clamp_max(last))
            recycled, _ = self.forward(recycled, batch, cache, selection)
            drafts.append(self._argmax(recycled))
        return torch.stack(drafts, dim=1)

    def _argmax(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden).argmax(-1)


def build_mtp(target: GlmModel, weights: MtpWeights) -> MtpLayer:
    """The MTP layer of a model: an index group of its own, with components of its own in the cache."""
    (number,) = target.config.mtp_layers
    layer = build_layer(target.config, weights.layer, target.numerics, number, IndexGroup((number,)), MTP_MLA_KV, MTP_INDEX_K)
    return MtpLayer(target=target, weights=weights, layer=layer)


def choose_max_drafts(runtime_config: RuntimeConfig, config: GlmConfig) -> int:
    """Drafts that a step may have here: what was asked for, or 0 where the checkpoint has no MTP layer that this runtime computes.

    Without `index_share_for_mtp_iteration` each draft step would choose a list of its own, which is not built.
    """
    can_draft = bool(config.mtp_layers) and config.index_share_for_mtp_iteration
    return runtime_config.max_drafts if can_draft else 0


def rows_of(selection: Selection, rows: Sequence[int]) -> Selection:
    """The lists of some rows: one for each sequence that drafts on, that of its last accepted row."""
    picked = torch.tensor(rows, dtype=torch.int64)
    return Selection(selection.lists.index_select(0, picked), selection.addresses.index_select(0, picked))


def _one_row_each(tokens: Tensor, positions: Tensor) -> StepBatch:
    """A draft step after step 0: nothing is stored, and what is attended to has been chosen."""
    nothing = torch.full_like(positions, -1)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        slots=nothing,
        row_sequences=torch.arange(positions.shape[0]),
        visible=positions + 1,
        block_tables=torch.zeros((positions.shape[0], 1), dtype=torch.int64),
        spans=(),
        scored=(),
        num_rows=positions.shape[0],
        max_visible=1,
    )
