"""Attention over parts of a context, put together: what one softmax over the whole of it would give."""

from torch import Tensor

from glm_runtime.ops.combine_shards import cpu, reference
from glm_runtime.ops.impl import Impl, check_shape, choose_impl

__all__ = ["combine_shards", "shard_weights"]


def combine_shards(attended: Tensor, lse: Tensor, *, impl: Impl | None = None) -> Tensor:
    """Join [W, T, H, C] and [W, T, H] to [T, H, C]. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    check_shape("combine_shards", "attended", attended, (-1, -1, -1, -1))
    check_shape("combine_shards", "lse", lse, tuple(attended.shape[:3]))
    if choose_impl(impl, attended) == "reference":
        return reference.combine_shards(attended, lse)
    return cpu.combine_shards(attended, lse)


def shard_weights(lse: Tensor, *, impl: Impl | None = None) -> Tensor:
    """What each part's output counts for, [W, T, H]. See `reference.py`. Raises ValueError for another number of dimensions."""
    check_shape("shard_weights", "lse", lse, (-1, -1, -1))
    if choose_impl(impl, lse) == "reference":
        return reference.shard_weights(lse)
    return cpu.shard_weights(lse)
