"""Queries of attention and of the indexer, from their projections to what the kernels read."""

from torch import Tensor

from glm_runtime.ops.fused_q import cpu, native, reference
from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.row_format import RowFormat

__all__ = ["fused_q", "index_queries"]


def fused_q(heads: Tensor, absorbed: Tensor, cos: Tensor, sin: Tensor, *, impl: Impl | None = None) -> Tensor:
    """Join absorbed queries with their rotated part. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    num_rows, num_heads, width = heads.shape
    check_shape("fused_q", "absorbed", absorbed, (num_rows, num_heads, -1))
    check_shape("fused_q", "cos", cos, (num_rows, -1))
    check_shape("fused_q", "sin", sin, tuple(cos.shape))
    if 2 * cos.shape[1] > width:
        raise ValueError(f"fused_q: cos rotates {2 * cos.shape[1]} numbers; heads are {width} wide")
    match choose_impl(impl, heads):
        case "native":
            return native.fused_q(heads, absorbed, cos, sin)
        case "cpu":
            return cpu.fused_q(heads, absorbed, cos, sin)
        case _:
            return reference.fused_q(heads, absorbed, cos, sin)


def index_queries(
    flat: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, row_format: RowFormat, *, impl: Impl | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate index queries and round them like keys. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    check_shape("index_queries", "flat", flat, (-1, weights.shape[1], row_format.width))
    check_shape("index_queries", "weights", weights, (flat.shape[0], -1))
    check_shape("index_queries", "cos", cos, (flat.shape[0], -1))
    check_shape("index_queries", "sin", sin, tuple(cos.shape))
    if 2 * cos.shape[1] > row_format.width:
        raise ValueError(f"index_queries: cos rotates {2 * cos.shape[1]} numbers; queries are {row_format.width} wide")
    match choose_impl(impl, flat):
        case "native":
            return native.index_queries(flat, weights, cos, sin, row_format)
        case "cpu":
            return cpu.index_queries(flat, weights, cos, sin, row_format)
        case _:
            return reference.index_queries(flat, weights, cos, sin, row_format)
