"""The K best tokens of each row out of several ranks' best, the same on every rank."""

import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.merge_topk import cpu, native, reference

__all__ = ["merge_topk"]


def merge_topk(scores: Tensor, tokens: Tensor, k: int, *, impl: Impl | None = None) -> Tensor:
    """Choose at most `k` tokens per row. See `reference.py`.

    Raises ValueError for shapes that do not fit together, for other dtypes than fp32 and int64, and for k < 1.
    """
    check_shape("merge_topk", "scores", scores, (-1, -1, -1))
    check_shape("merge_topk", "tokens", tokens, tuple(scores.shape))
    if scores.dtype != torch.float32 or tokens.dtype != torch.int64:
        raise ValueError(f"merge_topk: scores are {scores.dtype}, tokens {tokens.dtype}; expected fp32 and int64")
    if k < 1:
        raise ValueError(f"merge_topk: k is {k}; expected at least 1")
    match choose_impl(impl, scores):
        case "native":
            return native.merge_topk(scores, tokens, k)
        case "cpu":
            return cpu.merge_topk(scores, tokens, k)
        case _:
            return reference.merge_topk(scores, tokens, k)
