"""Both ends of the model, which tensor ranks cut by tokens: embedding and head.

A rank embeds the tokens that it has and gives zeros for the others: summed over the ranks that is every token's row, to the bit. Of a
row's logits a rank has those of its tokens; who needs a token or its probability gets it from a few numbers of each rank, and who needs
all logits gathers them. With several ranks these are exchanges, which every rank of the tensor group calls alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl
from glm_runtime.ops.top_probability import top_probability
from glm_runtime.ops.vocab_argmax import Best, merge_shards, vocab_argmax
from glm_runtime.parallel.collectives import Collectives
from glm_runtime.parallel.context import one_rank


def _alone() -> Collectives:
    return one_rank().tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of rows over this rank's part of the vocabulary: own [M, V / ranks] fp32, the first of token rank * V / ranks."""

    own: Tensor
    impl: Impl
    tensor: Collectives = field(default_factory=_alone)

    def whole(self) -> Tensor:
        """[M, V] fp32, on every rank."""
        if self.tensor.size == 1:
            return self.own
        return self.tensor.all_gather(self.own.contiguous()).transpose(0, 1).flatten(1)

    def best(self) -> Best:
        """Of each row over all tokens, the same on every rank."""
        own = self._own_best()
        return own if self.tensor.size == 1 else merge_shards(self._gather(own, own.values)[0])

    def best_with_chances(self) -> tuple[Best, Tensor]:
        """`best`, and how probable each is, [M] fp32. Rounds: as `top_probability`, and the sum over ranks in fp32."""
        own = self._own_best()
        chances = top_probability(self.own, own.values, impl=self.impl)
        if self.tensor.size == 1:
            return own, chances
        shards, shares = self._gather(own, chances)
        best = merge_shards(shards)
        # A shard's share is 1 / sum exp(logit - its largest).
        total = torch.zeros_like(best.values)
        for shard, share in zip(shards, shares, strict=True):
            total += (shard.values - best.values).exp() / share
        return best, total.reciprocal()

    def _own_best(self) -> Best:
        return vocab_argmax(self.own, first_id=self.tensor.rank * self.own.shape[1], impl=self.impl)

    def _gather(self, own: Best, numbers: Tensor) -> tuple[Sequence[Best], Tensor]:
        """The best of each shard, in order, and one fp32 number for each row of each: [ranks, M]."""
        columns = (own.values.view(torch.int32), own.ids.int(), own.is_finite.int(), numbers.contiguous().view(torch.int32))
        gathered = self.tensor.all_gather(torch.stack(columns))  # [ranks, 4, M]
        shards = [Best(values.view(torch.float32), ids.long(), is_finite.bool()) for values, ids, is_finite, _ in gathered]
        return shards, gathered[:, 3].contiguous().view(torch.float32)


@dataclass(frozen=True, slots=True)
class KnownScores:
    """As `Scores` of a rank that has all tokens, with what is asked of them: logits [M, V] fp32."""

    logits: Tensor
    known_best: Best
    chances: Tensor

    def whole(self) -> Tensor:
        """[M, V] fp32."""
        return self.logits

    def best(self) -> Best:
        """Of each row."""
        return self.known_best

    def best_with_chances(self) -> tuple[Best, Tensor]:
        """`best`, and how probable each is, [M] fp32."""
        return self.known_best, self.chances


def embed(tokens: Tensor, embedding: Tensor, dtype: torch.dtype, tensor: Collectives, *, is_cut: bool) -> Tensor:
    """Rows [T, hidden] of the embedding, of `dtype`, new. embedding: [V, hidden], or this rank's rows of it where it is cut."""
    if not is_cut:
        return embedding.index_select(0, tokens).to(dtype)
    count = embedding.shape[0]
    places = tokens - tensor.rank * count
    is_here = (places >= 0) & (places < count)
    rows = embedding.index_select(0, places.clamp(0, count - 1)).to(dtype)
    return tensor.all_reduce(torch.where(is_here[:, None], rows, 0.0).to(dtype))
