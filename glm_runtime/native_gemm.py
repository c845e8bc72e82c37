"""The model's matrix products by compiled kernels, over packed weights.

Every element of a result is one chain of fused multiply-adds in the order of K (`native/src/gemm_tile.hpp`), so a row's bits depend on
that row and the weight alone: no padding of rows, no probe. Sums stay fp32 until the one rounding at the end.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm_runtime.linear import Gemm
from glm_runtime.native.library import NativeLibrary, library
from glm_runtime.packed_matrix import Operand, PackedMatrix

_FP32_BF16, _FP32_FP32, _BF16_BF16 = 0, 1, 2
"""Kinds of (x, weight), as `gemm_tile.hpp` numbers them."""


@dataclass(frozen=True, slots=True)
class NativeGemm:
    """`Products` by the compiled kernels, on as many threads as torch has."""

    kernels: NativeLibrary = field(default_factory=library)

    @property
    def row_tile(self) -> int:
        """One: a row's bits do not depend on the others."""
        return 1

    def linear(self, x: Tensor, weight: Operand, *, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As `Products.linear`. Rounds: once, after adding. Returns a new tensor. Raises ValueError for what does not fit together."""
        packed = _packed(weight, "linear", is_stack=False, is_gated=False)
        out = torch.empty(x.shape[0], packed.num_outputs, dtype=dtype or x.dtype)
        if add is not None and (add.shape != out.shape or add.dtype != out.dtype or add.stride(1) != 1):
            raise ValueError(f"linear: add is {list(add.shape)} {add.dtype}; expected {list(out.shape)} {out.dtype}, contiguous rows")
        self._multiply("linear", x, packed, out, add)
        return out

    def gated(self, x: Tensor, weight: Operand) -> Tensor:
        """As `Products.gated`. Rounds: once, after the product of silu and up. Returns a new tensor. Raises as `linear`."""
        packed = _packed(weight, "gated", is_stack=False, is_gated=True)
        out = torch.empty(x.shape[0], packed.num_outputs // 2, dtype=x.dtype)
        self._multiply("gated", x, packed, out, None)
        return out

    def heads(self, x: Tensor, weight: Operand) -> Tensor:
        """As `Products.heads`. Rounds: once. Returns a new, contiguous tensor. Raises as `linear`."""
        packed = _packed(weight, "heads", is_stack=True, is_gated=False)
        out = torch.empty(x.shape[0], x.shape[1], packed.num_outputs, dtype=x.dtype)
        self._multiply("heads", x, packed, out, None)
        return out

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `Products.matmul`, by torch and without its padding: no compiled op asks for it."""
        return Gemm().matmul(x, weight)

    def _multiply(self, product: str, x: Tensor, weight: PackedMatrix, out: Tensor, add: Tensor | None) -> None:
        """x: [M, K], out: [M, columns]; for a stack [M, items, K] and [M, items, columns]."""
        panels = weight.panels
        num_items = panels.shape[0]
        expected = (x.shape[0], num_items, weight.num_inner) if weight.is_stack else (x.shape[0], weight.num_inner)
        if x.shape != expected:
            raise ValueError(f"{product}: x is {list(x.shape)}; expected {list(expected)}")
        if x.shape[0] == 0:
            return
        if x.stride(-1) != 1:
            x = x.contiguous()
        x, kind = wide_enough(x, weight)
        x_item, out_item = (x.stride(1), out.stride(1)) if weight.is_stack else (0, 0)
        self.kernels.glm_linear(
            x.data_ptr(), x.stride(0), x_item,
            panels.data_ptr(), kind, num_items, weight.num_outputs, weight.num_inner, weight.is_gated,
            out.data_ptr(), out.stride(0), out_item, out.dtype == torch.bfloat16,
            None if add is None else add.data_ptr(), 0 if add is None else add.stride(0),
            x.shape[0], torch.get_num_threads(),
        )  # fmt: skip


def wide_enough(x: Tensor, weight: PackedMatrix) -> tuple[Tensor, int]:
    """x as the kernels take it beside this weight, and the kind of the product. bf16 beside fp32 weights is widened."""
    if x.dtype == torch.bfloat16:
        return (x, _BF16_BF16) if weight.dtype == torch.bfloat16 else (x.float(), _FP32_FP32)
    if x.dtype != torch.float32:
        raise ValueError(f"x is {x.dtype}; expected float32 or bfloat16")
    return x, _FP32_BF16 if weight.dtype == torch.bfloat16 else _FP32_FP32


def _packed(weight: Operand, product: str, *, is_stack: bool, is_gated: bool) -> PackedMatrix:
    if not isinstance(weight, PackedMatrix) or weight.is_stack != is_stack or weight.is_gated != is_gated:
        raise ValueError(f"{product}: expected a packed weight with is_stack={is_stack} and is_gated={is_gated}")
    return weight
