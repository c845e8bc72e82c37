"""The K best visible tokens of each row, the same on every machine."""

from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.select_topk import cpu, native, reference

__all__ = ["select_topk"]


def select_topk(scores: Tensor, visible: Tensor, k: int, *, impl: Impl | None = None) -> Tensor:
    """Choose at most `k` tokens per row. See `reference.py`. Raises ValueError for shapes that do not fit together, or k < 1."""
    check_shape("select_topk", "visible", visible, (scores.shape[0],))
    if k < 1:
        raise ValueError(f"select_topk: k is {k}; expected at least 1")
    chosen = choose_impl(impl, scores)
    if chosen == "native":
        return native.select_topk(scores, visible, k)
    if chosen == "cpu":
        return cpu.select_topk(scores, visible, k)
    return reference.select_topk(scores, visible, k)
