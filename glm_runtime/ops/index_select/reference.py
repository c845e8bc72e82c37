"""The specification of the selection: `index_logits` and `select_topk`, row by row. Legend: `T` rows, `H` heads, `D` index head dim."""

from torch import Tensor
from torch.nn import functional

from glm_runtime.linear import Products
from glm_runtime.ops.index_logits import KEY_TILE_TOKENS, index_logits
from glm_runtime.ops.select_topk import select_topk
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import StepBatch


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheRegion,
    batch: StepBatch,
    topk: int,
    lists: Tensor,
    scores: Tensor | None,
    gemm: Products,
) -> None:
    """lists[t] = the min(topk, visible(t)) best tokens of row t, ascending, -1 after the last. Source: FACTS 3.5 and 3.6.

    queries: [T, H, D] and weights: [T, H] fp32, as `index_queries` gives them. keys: a region of index keys that holds the step's own.
    lists: [T, W] int64, W >= min(topk, longest context). A row that sees at most `topk` tokens lists all of them, unscored: neither its
    queries nor its keys are read.
    scores: [T, W] fp32, or None. With it every row is scored, one that lists all it sees too, and `batch.scored` holds every row that
    sees a token: scores[t, i] is that of lists[t, i], 0 for -0, -inf behind the last. Rounds: nothing below fp32.
    """
    tables = functional.pad(batch.block_tables, (0, -batch.block_tables.shape[1] % (KEY_TILE_TOKENS // keys.block_size_tokens)))
    lists.fill_(-1)
    if scores is not None:
        scores.fill_(float("-inf"))
    for row, visible in enumerate(batch.visible.tolist()):
        if visible <= topk:
            lists[row, :visible] = lists.new_tensor(range(visible))
        if not visible or (visible <= topk and scores is None):
            continue
        table, position = tables[batch.row_sequences[row]][None], batch.visible[row].view(1, 1) - 1
        all_scores = index_logits(queries[row][None, None], weights[row][None, None], keys, table, position, gemm=gemm, impl="reference")[0]
        if visible > topk:
            lists[row] = select_topk(all_scores, batch.visible[row : row + 1], topk, impl="reference")[0]
        if scores is not None:
            listed = lists[row][lists[row] >= 0]
            scores[row, : len(listed)] = all_scores[0, listed] + 0.0  # -0 becomes 0
