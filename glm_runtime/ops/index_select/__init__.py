"""What each row of a step attends to: index scores and their top-k, without the scores ever being returned."""

import torch
from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.impl import Impl, check_shape, check_width, choose_impl
from glm_runtime.ops.index_select import cpu, native, reference
from glm_runtime.paged_cache import CacheRegion
from glm_runtime.step_batch import StepBatch

__all__ = ["index_select"]


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheRegion,
    batch: StepBatch,
    topk: int,
    *,
    lists: Tensor,
    scores: Tensor | None = None,
    gemm: Products,
    scratch_bytes: int,
    impl: Impl | None = None,
) -> None:
    """Write the best `topk` visible tokens of every row to `lists`, what they scored to `scores`. See `reference.py`.

    gemm: not used by the compiled form. Raises ValueError for shapes that do not fit together, for lists that are not contiguous int64,
    for scores that are not contiguous fp32, and for lists narrower than `topk` when a row needs scores.
    """
    num_rows, num_heads, width = queries.shape
    check_shape("index_select", "weights", weights, (num_rows, num_heads))
    check_shape("index_select", "visible", batch.visible, (num_rows,))
    check_shape("index_select", "lists", lists, (num_rows, -1))
    check_width("index_select", "keys", keys, width)
    if lists.dtype != torch.int64 or not lists.is_contiguous():
        raise ValueError(f"index_select: lists is {lists.dtype} with strides {lists.stride()}; expected contiguous int64")
    if scores is not None:
        check_shape("index_select", "scores", scores, tuple(lists.shape))
        if scores.dtype != torch.float32 or not scores.is_contiguous():
            raise ValueError(f"index_select: scores is {scores.dtype} with strides {scores.stride()}; expected contiguous fp32")
    if lists.shape[1] < min(topk, batch.max_visible) or (batch.scored and lists.shape[1] != topk):
        raise ValueError(f"index_select: lists are {lists.shape[1]} wide; topk is {topk}, the longest context {batch.max_visible}")
    match choose_impl(impl, queries):
        case "native":
            native.index_select(queries, weights, keys, batch, topk, lists, scores, scratch_bytes)
        case "cpu":
            cpu.index_select(queries, weights, keys, batch, topk, lists, scores, gemm, scratch_bytes)
        case _:
            reference.index_select(queries, weights, keys, batch, topk, lists, scores, gemm)
