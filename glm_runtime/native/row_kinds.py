"""Numbers of the cache formats in the compiled kernels: the order of `RowKind` in `src/row_decode.hpp`."""

from glm_runtime.row_format import RowKind

ROW_KINDS = {kind: number for number, kind in enumerate(RowKind)}
