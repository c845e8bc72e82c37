"""A vocabulary in parts, on real ranks: the same embedding, tokens and logits as one rank has, and the same probability."""

import pytest
import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl
from glm_runtime.ops.top_probability import top_probability
from glm_runtime.ops.vocab_argmax import vocab_argmax
from glm_runtime.parallel.collectives import Operation
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout
from glm_runtime.vocabulary import Scores, embed
from tests.rank_pool import RankPool
from tests.unit.glm_runtime.ops.pools import NATIVE

NAN, INF = float("nan"), float("inf")
LAYOUTS = [ParallelLayout(tp_size=2), ParallelLayout(tp_size=4)]
on_each = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())


def rows_with_ties() -> Tensor:
    """16 tokens; the best is in every part of four, also twice and more often."""
    logits = torch.randint(-3, 3, (20, 16), generator=torch.Generator().manual_seed(1)).float()
    for row, places in enumerate(([0, 15], [5, 9], [4, 8, 12], [15], [3, 4], range(16))):
        logits[row, list(places)] = 4.0
    logits[6, 9], logits[7, 2], logits[7, 13], logits[8, 12] = NAN, INF, NAN, INF
    logits[9] = -8.0
    return logits


def score(context: ParallelContext, impl: Impl) -> tuple[Tensor, ...]:
    width = 16 // context.layout.tp_size
    own = rows_with_ties()[:, context.place.tensor * width :][:, :width]
    scores = Scores(own, impl, context.tensor)
    best, chances = scores.best_with_chances()
    again = scores.best()
    assert torch.equal(best.ids, again.ids)
    return scores.whole(), best.ids, best.values, best.is_finite, chances


@on_each
@pytest.mark.parametrize("impl", ["cpu", NATIVE])
def test_tokens_and_logits_are_those_of_one_rank(rank_pool: RankPool, layout: ParallelLayout, impl: Impl) -> None:
    logits = rows_with_ties()
    best = vocab_argmax(logits, impl="reference")
    expected = top_probability(logits[best.is_finite], best.values[best.is_finite], impl="reference")
    for whole, ids, values, is_finite, chances in rank_pool.run(layout, score, impl):
        assert torch.equal(whole.nan_to_num(7e7), logits.nan_to_num(7e7))
        assert ids.tolist() == best.ids.tolist(), "of equal ones the smallest id"
        assert torch.equal(values.nan_to_num(7e7), best.values.nan_to_num(7e7))
        assert torch.equal(is_finite, best.is_finite)
        assert torch.allclose(chances[is_finite], expected, rtol=1e-6, atol=0.0)


def embed_all(context: ParallelContext, dtype: torch.dtype, is_cut: bool) -> tuple[Tensor, int]:
    table = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    width = 24 // context.layout.tp_size
    own = table[context.place.tensor * width :][:width] if is_cut else table
    rows = embed(torch.arange(24).flip(0), own, dtype, context.tensor, is_cut=is_cut)
    return rows, context.meter.calls.get((GroupKind.TENSOR, Operation.ALL_REDUCE), 0)


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_token_is_embedded_to_the_bit(rank_pool: RankPool, layout: ParallelLayout, dtype: torch.dtype) -> None:
    table = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
    for is_cut in (True, False):
        for rows, num_sums in rank_pool.run(layout, embed_all, dtype, is_cut):
            assert torch.equal(rows, table.flip(0))
            assert rows.dtype is dtype
            assert num_sums == int(is_cut)


def test_one_rank_exchanges_nothing() -> None:
    logits = rows_with_ties()
    scores = Scores(logits, "cpu")
    assert scores.whole() is logits
    assert scores.best().ids.tolist() == vocab_argmax(logits, impl="reference").ids.tolist()
