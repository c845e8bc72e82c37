"""Dense causal attention on expanded keys and values: prefill of contexts that need no selection."""

from torch import Tensor

from glm_runtime.ops.dense_mla import cpu, reference
from glm_runtime.ops.impl import Impl, check_shape, choose_impl

__all__ = ["dense_mla"]


def dense_mla(
    queries: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float, scratch_bytes: int, impl: Impl | None = None
) -> Tensor:
    """Attend to every earlier token. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    num_rows, num_heads, width = queries.shape
    check_shape("dense_mla", "keys", keys, (start + num_rows, num_heads, width))
    check_shape("dense_mla", "values", values, (start + num_rows, num_heads, -1))
    if choose_impl(impl, queries) == "cpu":
        return cpu.dense_mla(queries, keys, values, start, scale, scratch_bytes)
    return reference.dense_mla(queries, keys, values, start, scale)
