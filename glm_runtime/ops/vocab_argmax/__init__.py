"""The best token of each row over a part of the vocabulary, and over all parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.vocab_argmax import cpu, native, reference
from glm_runtime.ops.vocab_argmax.reference import Best

__all__ = ["Best", "merge_shards", "vocab_argmax"]


def vocab_argmax(logits: Tensor, *, first_id: int = 0, impl: Impl | None = None) -> Best:
    """The best token of each row of a shard whose first column is token `first_id`. See `reference.py`.

    Raises ValueError for a shard without columns.
    """
    check_shape("vocab_argmax", "logits", logits, (-1, -1))
    if not logits.shape[1]:
        raise ValueError("vocab_argmax: logits have no columns; a shard holds at least one token")
    match choose_impl(impl, logits):
        case "native":
            return native.vocab_argmax(logits, first_id)
        case "cpu":
            return cpu.vocab_argmax(logits, first_id)
        case "reference":
            return reference.vocab_argmax(logits, first_id)


def merge_shards(shards: Sequence[Best]) -> Best:
    """The best over shards, which come in ascending order of their ids. Raises ValueError for none."""
    if not shards:
        raise ValueError("merge_shards: no shards")
    values = torch.stack([shard.values for shard in shards])  # [shards, M]
    order = cpu.first_largest(values.t())
    ids = torch.stack([shard.ids for shard in shards], dim=1).gather(1, order[:, None]).squeeze(1)
    is_finite = torch.stack([shard.is_finite for shard in shards]).all(0)
    return Best(values.t().gather(1, order[:, None]).squeeze(1), ids, is_finite)
