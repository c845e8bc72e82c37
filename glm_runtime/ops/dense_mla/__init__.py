"""Attention on expanded keys and values, over all earlier tokens or those of a list: prefill of contexts that are not long."""

from torch import Tensor

from glm_runtime.ops.dense_mla import cpu, native, reference
from glm_runtime.ops.impl import Impl, check_shape, choose_impl

__all__ = ["dense_mla"]


def dense_mla(
    queries: Tensor,
    rebuilt: Tensor,
    shared_key: Tensor,
    lists: Tensor | None = None,
    *,
    start: int,
    scale: float,
    scratch_bytes: int,
    impl: Impl | None = None,
) -> Tensor:
    """Attend to every earlier token, or to the listed ones. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    num_rows, num_heads, width = queries.shape
    context, rope = start + num_rows, shared_key.shape[-1]
    check_shape("dense_mla", "shared_key", shared_key, (context, -1))
    check_shape("dense_mla", "rebuilt", rebuilt, (context, num_heads, -1))
    if lists is not None:
        check_shape("dense_mla", "lists", lists, (num_rows, -1))
    if not 0 < width - rope < rebuilt.shape[2]:
        raise ValueError(f"dense_mla: queries are {width} wide, {rope} of it shared; rebuilt has {rebuilt.shape[2]} numbers a head")
    match choose_impl(impl, queries):
        case "native":
            return native.dense_mla(queries, rebuilt, shared_key, lists, start, scale)
        case "cpu":
            return cpu.dense_mla(queries, rebuilt, shared_key, lists, start, scale, scratch_bytes)
        case _:
            return reference.dense_mla(queries, rebuilt, shared_key, lists, start, scale)
