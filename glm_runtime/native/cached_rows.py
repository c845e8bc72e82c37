"""Cache regions as arguments of the compiled kernels: addresses, strides in bytes, and the number of the format."""

from glm_runtime.paged_cache import CacheRegion
from glm_runtime.row_format import RowKind

ROW_KINDS = {kind: number for number, kind in enumerate(RowKind)}
"""The order of `RowKind` in `src/row_decode.hpp`."""


def listed_rows(region: CacheRegion) -> tuple[int, int, int, int]:
    """(address of `region.rows`, bytes from one of its rows to the next, bytes of a row, format) for formats of one plane."""
    size = region.rows.element_size()
    return region.rows.data_ptr(), region.unit * size, region.row_format.bytes_per_token, ROW_KINDS[region.row_format.kind]


def index_keys(region: CacheRegion) -> tuple[int, ...]:
    """(address, bytes a block, bytes a token) of the numbers and of the scales, format, tokens a block."""
    return *region.plane_strides, ROW_KINDS[region.row_format.kind], region.block_size_tokens
