"""Matrix products whose rows do not see each other.

A BLAS picks its kernel by the number of rows, so that a row alone and the same row in a batch may differ in the last bits.
`Gemm` says how to call it so that they do not: with a multiple of `row_tile` rows, and if that is not enough with exactly
`row_tile` rows per call. `choose_gemm` finds out by trying what this machine needs; nothing is assumed about the library.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from glm_runtime.activation import silu
from glm_runtime.packed_matrix import Operand, plain
from kv_transfer.errors import ConfigError

logger = logging.getLogger(__name__)

ROW_TILES = (16, 32, 64)
"""Candidates. Measured with MKL 2024.2: rows are equal from 4 rows per thread on, so 16 serves up to 4 threads."""

_PROBE_MULTIPLES = (1, 2, 3, 5, 8, 32)
_PROBE_MAX_COLUMNS = 4096
_PROBE_ITEMS = 9


class Products(Protocol):
    """The matrix products of the model, by torch (`Gemm`) or compiled (`NativeGemm`). Operands are as `load_weights` made them.

    Sums are fp32. Rows and heads may lie at any stride, numbers within one are contiguous.
    """

    @property
    def row_tile(self) -> int:
        """A step's rows are padded to a multiple of this so that a row's bits do not depend on how many there are."""
        ...

    def linear(self, x: Tensor, weight: Operand, *, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """y = x W^T (+ add). x: [M, K]; weight: [N, K]; add: [M, N] of the result's dtype. Returns [M, N] of `dtype`, by default x's."""
        ...

    def gated(self, x: Tensor, weight: Operand) -> Tensor:
        """y = silu(x W_gate^T) * x W_up^T. x: [M, K]; weight: [2 I, K], gate rows first, packed as gated. Returns [M, I] of x's dtype."""
        ...

    def heads(self, x: Tensor, weight: Operand) -> Tensor:
        """y[t, h] = x[t, h] W_h. x: [T, H, K]; plain weight: [H, K, N]; packed: [H, N, K]. Returns [T, H, N] of x's dtype."""
        ...

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """y = x W for a right side that is no weight. x: [M, K], weight: [K, N], or both with a leading batch dimension."""
        ...


@dataclass(frozen=True, slots=True)
class Gemm:
    """How to call the BLAS. row_tile: rows are padded with zeros to a multiple of it. is_fixed: each call has exactly that many.

    Results may be views of padded products. Rounds: each product to its inputs' dtype, before anything is added.
    """

    row_tile: int = 1
    is_fixed: bool = False

    def linear(self, x: Tensor, weight: Operand, *, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As `Products.linear`."""
        product = self.matmul(x, plain(weight).t()).to(dtype or x.dtype)
        return product if add is None else add + product

    def gated(self, x: Tensor, weight: Operand) -> Tensor:
        """As `Products.gated`."""
        gate, up = self.linear(x, weight).chunk(2, dim=-1)
        return silu(gate) * up

    def heads(self, x: Tensor, weight: Operand) -> Tensor:
        """As `Products.heads`."""
        return self.matmul(x.transpose(0, 1), plain(weight)).transpose(0, 1)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """y = x W. x: [M, K], weight: [K, N], or both with a leading batch dimension. Returns [M, N] with it, as `linear`."""
        num_rows = x.shape[-2]
        padded = functional.pad(x, (0, 0, 0, -num_rows % self.row_tile)) if num_rows % self.row_tile else x
        if self.is_fixed and padded.shape[-2] > self.row_tile:
            starts = range(0, padded.shape[-2], self.row_tile)
            product = torch.cat([padded[..., start : start + self.row_tile, :] @ weight for start in starts], dim=-2)
        else:
            product = padded @ weight
        return product[..., :num_rows, :] if padded is not x else product


def choose_gemm(shapes: Iterable[tuple[int, int]], *, seed: int = 0) -> Gemm:
    """The cheapest `Gemm` under which every (K, N) of `shapes` is row-invariant in fp32 on this machine, found by trying.

    Raises ConfigError when none is: then the deterministic mode cannot be had here.
    """
    wanted = sorted({(inner, min(columns, _PROBE_MAX_COLUMNS)) for inner, columns in shapes})
    generator = torch.Generator().manual_seed(seed)
    for candidate in [Gemm(tile) for tile in ROW_TILES] + [Gemm(tile, is_fixed=True) for tile in ROW_TILES]:
        if all(is_row_invariant(candidate, inner, columns, generator) for inner, columns in wanted):
            logger.info("gemm chosen row_tile=%d is_fixed=%s threads=%d", candidate.row_tile, candidate.is_fixed, torch.get_num_threads())
            return candidate
    raise ConfigError(
        f"the BLAS of this machine gives a row other bits in other batches with {torch.get_num_threads()} threads; "
        "set runtime.num_threads = 1, or runtime.numerics = 'fast'"
    )


def is_row_invariant(gemm: Gemm, inner: int, columns: int, generator: torch.Generator) -> bool:
    """Whether a tile of random rows gives the same bits in larger batches, at another place in them, and batched.

    Both layouts of the weight are tried, each against itself: they are different kernels of the BLAS.
    """
    weight = torch.randn(columns, inner, generator=generator).t()
    rows = torch.randn(gemm.row_tile * max(_PROBE_MULTIPLES), inner, generator=generator)
    return all(_is_invariant(gemm, rows, layout) for layout in (weight, weight.contiguous()))


def _is_invariant(gemm: Gemm, rows: Tensor, weight: Tensor) -> bool:
    tile = gemm.row_tile
    expected = gemm.matmul(rows[:tile], weight)
    for multiple in _PROBE_MULTIPLES:
        batch = rows[: tile * multiple]
        moved = torch.roll(gemm.matmul(torch.roll(batch, 1, dims=0), weight), -1, dims=0)
        batched = gemm.matmul(batch.expand(3, -1, -1), weight.expand(3, -1, -1))
        results = [gemm.matmul(batch, weight), moved, *batched]
        if not all(torch.equal(result[:tile], expected) for result in results):
            return False
    return True


def check_items_independent(rows: int, inner: int, columns: int, *, seed: int = 0) -> None:
    """Check that an item of a batched product has the same bits whatever the number of items, both layouts of the right operand.

    Raises ConfigError when it has not: then the deterministic mode cannot be had here.
    """
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(_PROBE_ITEMS, rows, inner, generator=generator)
    right = torch.randn(_PROBE_ITEMS, columns, inner, generator=generator).transpose(1, 2)
    for operand in (right, right.contiguous()):
        expected = torch.bmm(left, operand)
        for count in (1, 2, 3, _PROBE_ITEMS - 1):
            if not torch.equal(torch.bmm(left[-count:], operand[-count:]), expected[-count:]):
                raise ConfigError(
                    f"batched products of {rows} x {inner} x {columns} depend on the batch on this machine; "
                    "set runtime.num_threads = 1, or runtime.numerics = 'fast'"
                )
