"""The weight operand of the compiled products: panels of 32 columns, read front to back.

Knows: the layout, and which dtype holds the values exactly. Does not know how it is multiplied (`native_gemm.py`).

    bf16  [N / 32][K / 2][32][2]   pairs along K, what vdpbf16ps takes; fp32 activations widen the halves of a pair
    fp32  [N / 32][K][32]          for values that no bf16 holds

N is padded to whole panels and K to whole pairs, with zeros.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

PANEL_COLUMNS = 32
_HALF = PANEL_COLUMNS // 2


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W [N, K], or a stack of equal ones [items, N, K], as panels.

    panels: [items, N / 32, ...] as above, contiguous. is_gated: N counts gate rows and then up rows; a panel holds 16 of each, so that
    silu(gate) * up is formed where both sums are.
    """

    panels: Tensor
    num_outputs: int
    num_inner: int
    is_stack: bool = False
    is_gated: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What the values are stored in."""
        return self.panels.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As the plain operand's: [N, K] or [items, N, K]."""
        matrix = (self.num_outputs, self.num_inner)
        return (self.panels.shape[0], *matrix) if self.is_stack else matrix

    def plain(self) -> Tensor:
        """The operand as it was before packing, new."""
        items = self.panels.shape[0]
        rows = self.panels.view(items, -1, self._depth, PANEL_COLUMNS, _pair(self.dtype)).transpose(2, 3)
        rows = rows.reshape(items, -1, self._depth * _pair(self.dtype))
        if self.is_gated:
            halves = rows.view(items, -1, 2, _HALF, rows.shape[-1]).transpose(1, 2).reshape(items, 2, -1, rows.shape[-1])
            rows = halves[:, :, : self.num_outputs // 2].flatten(1, 2)
        plain = rows[:, : self.num_outputs, : self.num_inner]
        return (plain if self.is_stack else plain[0]).contiguous()

    @property
    def _depth(self) -> int:
        return self.panels.shape[2]


Operand = Tensor | PackedMatrix
"""The right side of a product: [N, K] (or a stack of such) as a plain tensor for torch, or packed for the compiled kernels."""


def plain(operand: Operand) -> Tensor:
    """The operand as a tensor: itself, or unpacked into a new one."""
    return operand.plain() if isinstance(operand, PackedMatrix) else operand


def plain_heads(operand: Operand) -> Tensor:
    """[H, K, N], by which `Products.heads` multiplies: itself, or unpacked into a new one."""
    return operand.plain().transpose(1, 2) if isinstance(operand, PackedMatrix) else operand


def is_exact_bf16(weight: Tensor) -> bool:
    """Whether every value is a bf16 (NaN is)."""
    if weight.dtype == torch.bfloat16:
        return True
    is_same = weight.to(torch.bfloat16) == weight
    return bool(is_same.all()) or bool((is_same | weight.isnan()).all())


def pack(weight: Tensor, *, is_gated: bool = False) -> PackedMatrix:
    """Pack [N, K] or [items, N, K], bf16 or fp32: as bf16 when that loses nothing, else as fp32."""
    exact = weight.to(torch.bfloat16) if is_exact_bf16(weight) else weight
    stack = exact if exact.dim() == 3 else exact[None]
    panels = empty_panels(stack.shape[0], stack.shape[1], stack.shape[2], exact.dtype)
    for item, one in zip(panels, stack, strict=True):
        pack_into(item, one, is_gated=is_gated)
    return PackedMatrix(panels, weight.shape[-2], weight.shape[-1], is_stack=weight.dim() == 3, is_gated=is_gated)


class StackPacker:
    """Packs equal matrices as they come, one at a time: as bf16 until one of them is not exactly that, then all as fp32."""

    def __init__(self, num_items: int, num_outputs: int, num_inner: int, *, is_gated: bool = False) -> None:
        self._is_gated = is_gated
        self._num_done = 0
        self._packed = PackedMatrix(
            empty_panels(num_items, num_outputs, num_inner, torch.bfloat16), num_outputs, num_inner, is_stack=True, is_gated=is_gated
        )

    def add(self, weight: Tensor) -> None:
        """The next matrix, [N, K]."""
        if self._packed.dtype == torch.bfloat16 and not is_exact_bf16(weight):
            self._widen()
        pack_into(self._packed.panels[self._num_done], weight, is_gated=self._is_gated)
        self._num_done += 1

    def stack(self) -> PackedMatrix:
        """The whole; every item has been added."""
        assert self._num_done == self._packed.panels.shape[0], "a stack is taken before it is complete"
        return self._packed

    def _widen(self) -> None:
        narrow = self._packed
        wide = empty_panels(narrow.panels.shape[0], narrow.num_outputs, narrow.num_inner, torch.float32)
        for number in range(self._num_done):
            one = replace(narrow, panels=narrow.panels[number : number + 1], is_stack=False)
            pack_into(wide[number], one.plain().float(), is_gated=self._is_gated)
        self._packed = replace(narrow, panels=wide)


def empty_panels(num_items: int, num_outputs: int, num_inner: int, dtype: torch.dtype) -> Tensor:
    """Memory for a stack, not yet written: [items, panels, depth, 32, pair]."""
    pair = _pair(dtype)
    return torch.empty(num_items, -(-num_outputs // PANEL_COLUMNS), -(-num_inner // pair), PANEL_COLUMNS, pair, dtype=dtype)


def pack_into(panels: Tensor, weight: Tensor, *, is_gated: bool = False) -> None:
    """Write one matrix [N, K], of the panels' dtype or exactly convertible, into its panels [panels, depth, 32, pair]."""
    num_panels, depth, _, pair = panels.shape
    columns = depth * pair
    if is_gated:
        halves = _padded(weight.reshape(2, -1, weight.shape[1]), num_panels * _HALF, columns)
        rows = halves.view(2, num_panels, _HALF, depth, pair).permute(1, 3, 0, 2, 4)
        panels.view(num_panels, depth, 2, _HALF, pair).copy_(rows)
    else:
        padded = _padded(weight, num_panels * PANEL_COLUMNS, columns)
        panels.copy_(padded.view(num_panels, PANEL_COLUMNS, depth, pair).transpose(1, 2))


def _padded(weight: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Contiguous, with zeros below and to the right up to a size; itself where nothing is missing."""
    missing = (0, num_columns - weight.shape[-1], 0, num_rows - weight.shape[-2])
    return functional.pad(weight, missing) if any(missing) else weight.contiguous()


def _pair(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
