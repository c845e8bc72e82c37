"""GLM's decoder, top to bottom: embedding, layers in index groups, final norm, head.

x = embed(tokens); per layer x += attention(RMS(x)), x += ffn(RMS(x)); logits = head(RMS(x)). The MTP layer is not part of it.
A sum is left to the norm that follows it: between two segments of a layer stand the residual stream and what is owed to it. Tensor ranks
each owe a part; it is summed over them before that norm, twice a layer, and everything between two sums is the same on all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from glm_runtime.attention import Attention
from glm_runtime.cache_layout import INDEX_K, MLA_KV
from glm_runtime.config import GlmConfig
from glm_runtime.index_group import IndexGroup, Selection, build_index_groups
from glm_runtime.indexer import Indexer
from glm_runtime.moe import GatedMlp, MixtureOfExperts
from glm_runtime.numerics import Numerics
from glm_runtime.ops.add_rms_norm import add_rms_norm
from glm_runtime.paged_cache import PagedCache
from glm_runtime.parallel.collectives import Collectives
from glm_runtime.parallel.context import ParallelContext, one_rank
from glm_runtime.parallel.prefill_context import RowShare, share_rows
from glm_runtime.rope import RopeTable
from glm_runtime.step_batch import StepBatch
from glm_runtime.vocabulary import Scores, embed
from glm_runtime.weights import LayerWeights, ModelWeights, MoeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedChoices:
    """Discrete choices to take instead of the model's own, for comparison with an oracle whose rounding falls the other way.

    lists: by indexing layer, [T, index_topk] int64 ascending tokens; deterministic mode only. experts: by MoE layer, [T, experts
    per token] int64. In both, -1 in a row's first column leaves that row to the model.
    """

    lists: Mapping[int, Tensor] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)

    def shared(self, share: RowShare) -> "ForcedChoices":
        """Those of the rows that this rank computes."""
        return ForcedChoices(
            lists={layer: share.take(rows, -1) for layer, rows in self.lists.items()},
            experts={layer: share.take(rows, -1) for layer, rows in self.experts.items()},
        )

    def padded(self, num_rows: int) -> "ForcedChoices":
        """The same with free rows added up to `num_rows`, as the step's padding."""
        return ForcedChoices(
            lists={layer: _pad_rows(rows, num_rows) for layer, rows in self.lists.items()},
            experts={layer: _pad_rows(rows, num_rows) for layer, rows in self.experts.items()},
        )


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    return functional.pad(rows, (0, 0, 0, num_rows - rows.shape[0]), value=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """One layer: attention and feed-forward, each on the normalised residual stream."""

    config: GlmConfig
    weights: LayerWeights
    attention: Attention
    mlp: GatedMlp | MixtureOfExperts
    numerics: Numerics
    tensor: Collectives

    def forward(
        self,
        residual: Tensor,
        owed: tuple[Tensor, ...],
        rope: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: PagedCache,
        selection: Selection | None,
        forced: ForcedChoices,
    ) -> tuple[Tensor, tuple[Tensor, ...], Selection]:
        """residual: [T, hidden]; owed: what the layer before left to add to it, as `add_rms_norm` takes it; of this tensor rank.

        Returns the residual stream, new, before this layer's feed-forward output, that output, owed, and the index group's selection.
        """
        layer, eps, impl = self.attention.layer, self.config.rms_norm_eps, self.numerics.impl
        owed = sum_owed(owed, self.tensor, self.numerics.dtype)
        residual, hidden = add_rms_norm(residual, owed, self.weights.input_norm, eps, impl=impl)
        attended, selection = self.attention.forward(hidden, rope, batch, cache, selection, forced.lists.get(layer))
        owed = sum_owed((attended,), self.tensor, self.numerics.dtype)
        residual, hidden = add_rms_norm(residual, owed, self.weights.post_attention_norm, eps, impl=impl)
        if isinstance(self.mlp, MixtureOfExperts):
            return residual, self.mlp.forward(hidden, forced.experts.get(layer)), selection
        return residual, (self.mlp.forward(hidden),), selection

    def join(self) -> None:
        """Take part in other workers' pass over this layer; this worker has no rows in it."""
        if isinstance(self.mlp, MixtureOfExperts):
            self.mlp.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class GlmModel:
    """The target model. Holds nothing between steps but its groups' buffers, hence one step at a time; the cache is passed in."""

    config: GlmConfig
    weights: ModelWeights
    numerics: Numerics
    rope: RopeTable
    groups: tuple[IndexGroup, ...]
    layers: tuple[DecoderLayer, ...]
    context: ParallelContext

    def forward(self, batch: StepBatch, cache: PagedCache, forced: ForcedChoices | None = None) -> Tensor:
        """Compute a step's rows and store their keys. Returns [T, hidden]: hidden states after the final norm, new.

        Ranks that share rows compute their own and have all of them in the end, without the padding.
        """
        forced = forced or ForcedChoices()
        share = self.share(batch, cache)
        if share is None:
            return self._forward(batch, cache, forced)
        return share.whole(self._forward(share.batch, cache, forced.shared(share)))

    def join(self) -> None:
        """Take part in a `forward` of the replica's other workers, where this one has no rows: as many exchanges, and no attention."""
        for layer in self.layers:
            layer.join()

    def share(self, batch: StepBatch, cache: PagedCache) -> RowShare | None:
        """How ranks share these rows, where they do."""
        topk, row_tile = self.config.index_topk, self.numerics.gemm.row_tile
        return share_rows(batch, self.context, index_topk=topk, block_size_tokens=cache.block_size_tokens, row_tile=row_tile)

    def _forward(self, batch: StepBatch, cache: PagedCache, forced: ForcedChoices) -> Tensor:
        residual = self.embed(batch.tokens)
        owed: tuple[Tensor, ...] = ()
        rope = self.rope.at(batch.positions)
        for group in self.groups:
            selection: Selection | None = None
            for layer in group.layers:
                residual, owed, selection = self.layers[layer].forward(residual, owed, rope, batch, cache, selection, forced)
        return self.final_norm(residual, owed, self.weights.final_norm)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, hidden] in the runtime's dtype, new."""
        is_cut = self.context.tensor.size > 1 and not self.context.layout.replicates_embedding
        return embed(tokens, self.weights.embedding, self.numerics.dtype, self.context.tensor, is_cut=is_cut)

    def final_norm(self, residual: Tensor, owed: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """[T, hidden], new: what the last layer left, summed and normalised."""
        owed = sum_owed(owed, self.context.tensor, self.numerics.dtype)
        return add_rms_norm(residual, owed, weight, self.config.rms_norm_eps, impl=self.numerics.impl)[1]

    def scores(self, hidden: Tensor) -> Scores:
        """Logits of rows of `forward`'s result, as far as they are here. Rounds: by torch, the product to the runtime's dtype."""
        own = self.numerics.gemm.linear(hidden, self.weights.head, dtype=torch.float32)
        return Scores(own, self.numerics.impl, self.context.tensor)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, vocabulary] fp32 from rows of `forward`'s result, on every rank. Rounds: as `scores`."""
        return self.scores(hidden).whole()


def sum_owed(owed: tuple[Tensor, ...], tensor: Collectives, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What all tensor ranks owe, where there are several: one summand, or none.

    Rounds: this rank's sum to `dtype`, the runtime's, as it travels; the sum over ranks to it.
    """
    if tensor.size == 1 or not owed:
        return owed
    total = owed[0].float()
    for summand in owed[1:]:
        total = total + summand.float()
    return (tensor.all_reduce(total.to(dtype).contiguous()),)


def build_model(
    config: GlmConfig,
    weights: ModelWeights,
    numerics: Numerics,
    max_positions: int,
    max_step_tokens: int | None = None,
    context: ParallelContext | None = None,
) -> GlmModel:
    """Assemble the model for sequences of at most `max_positions` tokens. max_step_tokens: as `build_index_groups`.

    context: the rank that has these weights; None is the only one.
    """
    context = context or one_rank()
    groups = build_index_groups(config, max_step_tokens)
    layers = tuple(
        build_layer(config, weights.layers[layer], numerics, layer, group, context) for group in groups for layer in group.layers
    )
    rope = RopeTable.build(max_positions, config.qk_rope_head_dim, config.rope_theta)
    return GlmModel(config=config, weights=weights, numerics=numerics, rope=rope, groups=groups, layers=layers, context=context)


def build_layer(
    config: GlmConfig,
    weights: LayerWeights,
    numerics: Numerics,
    layer: int,
    group: IndexGroup,
    context: ParallelContext,
    mla_component: str = MLA_KV,
    index_component: str = INDEX_K,
) -> DecoderLayer:
    """One layer on its weights, whose keys lie in these components of the cache."""
    indexer = Indexer(config=config, weights=weights.indexer, numerics=numerics, context=context) if weights.indexer is not None else None
    attention = Attention(
        config=config,
        layer=layer,
        group=group,
        weights=weights.attention,
        indexer=indexer,
        numerics=numerics,
        mla_component=mla_component,
        index_component=index_component,
        context=context,
    )
    mlp: GatedMlp | MixtureOfExperts
    if isinstance(weights.mlp, MoeWeights):
        mlp = MixtureOfExperts(config=config, weights=weights.mlp, numerics=numerics, context=context)
    else:
        mlp = GatedMlp(weights=weights.mlp, numerics=numerics)
    return DecoderLayer(config=config, weights=weights, attention=attention, mlp=mlp, numerics=numerics, tensor=context.tensor)
