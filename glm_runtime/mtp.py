"""The multi-token-prediction layer: from a row's hidden state and the token after it, a guess at the token after that.

u = W_eh [RMS_e(emb(t_{P+1})) | RMS_h(h_P)]; u -> one full decoder layer at position P -> m = RMS(.); a draft is argmax(head(m)), or is
drawn from its softmax. h_P is the target's hidden state *after* its final norm, and so is the m that the next draft step takes for it.
Embedding, head and rotary table are the target's. Step 0 computes all rows of a target step and stores their keys; the steps after it
(`draft_steps.py`) compute one row a sequence, each one position further, and attend to the list that step 0 chose for its last row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.cache_layout import MTP_INDEX_K, MTP_MLA_KV
from glm_runtime.index_group import Selection, build_mtp_groups
from glm_runtime.model import DecoderLayer, ForcedChoices, GlmModel, build_layer
from glm_runtime.ops.embed_eh_norm import EhNorms, embed_eh_norm
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

        Ranks that share rows compute their own of step 0 and have all of m in the end, but the selection of their own rows only
        (`whole_selection`). Draft steps after it have few rows and store nothing: each rank computes all of them.
        """
        share = self.target.share(batch, cache) if selection is None else None
        if share is None:
            return self._forward(hidden, batch, cache, selection)
        own, selection = self._forward(share.take(hidden), share.batch, cache, None)
        return share.whole(own), selection

    def join(self) -> None:
        """Take part in a `forward` of the replica's other workers, where this one has no rows."""
        self.layer.join()

    def whole_selection(self, selection: Selection, batch: StepBatch, cache: PagedCache) -> Selection:
        """What step 0 over `batch` has chosen for all of its rows; `selection`: for those of this rank."""
        share = self.target.share(batch, cache)
        if share is None:
            return selection
        group, lists = self.layer.attention.group, share.whole(selection.lists)
        opened = group.open(*lists.shape)
        opened.copy_(lists)
        return group.convert(opened, batch, cache.region(MTP_MLA_KV, self.layer.attention.layer), self.target.numerics.impl)

    def _forward(self, hidden: Tensor, batch: StepBatch, cache: PagedCache, selection: Selection | None) -> tuple[Tensor, Selection]:
        target = self.target
        norms = EhNorms(self.weights.embedding_norm, self.weights.hidden_norm, target.config.rms_norm_eps)
        tokens, embedding = batch.tokens, target.weights.embedding
        if target.context.tensor.size > 1:
            # Row t of the embedded tokens is token t's.
            tokens, embedding = torch.arange(batch.tokens.shape[0]), target.embed(batch.tokens)
        halves = embed_eh_norm(tokens, batch.positions, hidden, embedding, norms, impl=target.numerics.impl)
        x = target.numerics.gemm.linear(halves, self.weights.projection)
        rope = target.rope.at(batch.positions)
        residual, owed, selection = self.layer.forward(x, (), rope, batch, cache, selection, ForcedChoices())
        return target.final_norm(residual, owed, self.weights.final_norm), selection


def build_mtp(target: GlmModel, weights: MtpWeights, max_step_tokens: int | None = None) -> MtpLayer:
    """The MTP layer of a model: an index group of its own, with components of its own in the cache."""
    (group,) = build_mtp_groups(target.config, max_step_tokens)
    layer = build_layer(target.config, weights.layer, target.numerics, group.leader, group, target.context, MTP_MLA_KV, MTP_INDEX_K)
    return MtpLayer(target=target, weights=weights, layer=layer)
