"""Rotary positions in GLM's form: interleaved pairs (2i, 2i + 1), for MLA and for the indexer alike, from one table.

Rotated pairs stay where they are. transformers returns all even parts, then all odd parts; dot products agree, bytes do not.
"""

import torch
from torch import Tensor

_STRETCH = 1024
"""Positions computed at a time, always the same ones together: a position's numbers do not depend on who asked first."""


class RopeTable:
    """cos and sin of the positions of the longest sequence, [positions, R / 2] fp32 each, made when positions are first needed.

    Pages of the two tables that nobody asked for take no memory: a model that could do 1M positions starts at once.
    """

    def __init__(self, cos: Tensor, sin: Tensor, frequencies: Tensor | None = None) -> None:
        """frequencies: [R / 2] fp64, to fill the tables from as needed; without them they are full."""
        self.cos, self.sin = cos, sin
        self._frequencies = frequencies
        self._missing = set(range(-(-cos.shape[0] // _STRETCH))) if frequencies is not None else set()

    @classmethod
    def build(cls, num_positions: int, rope_dim: int, theta: float) -> "RopeTable":
        """angle(p, i) = p * theta^(-2i / R), i < R / 2, for p < num_positions.

        Rounds: once, from fp64; an angle computed in fp32 is wrong by up to 0.05 rad near position 1M.
        """
        frequencies = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
        return cls(torch.empty(num_positions, rope_dim // 2), torch.empty(num_positions, rope_dim // 2), frequencies)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin rows of `positions` [T]: [T, R / 2] fp32 each, new. Raises IndexError for a position beyond the table."""
        self.prepare(positions)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def prepare(self, positions: Tensor) -> None:
        """Make the rows of `positions` [T] where they are missing, for who will read the tables without asking."""
        if self._missing:
            for stretch in self._missing.intersection([position // _STRETCH for position in positions.tolist()]):
                self._fill(stretch)

    def _fill(self, stretch: int) -> None:
        assert self._frequencies is not None, "a table that was given is full"
        first = stretch * _STRETCH
        angles = torch.outer(torch.arange(first, first + _STRETCH, dtype=torch.float64), self._frequencies)
        for table, values in ((self.cos, angles.cos()), (self.sin, angles.sin())):
            rows = table[first : first + _STRETCH]
            rows.copy_(values[: len(rows)])
        self._missing.remove(stretch)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """e' = e cos - o sin, o' = o cos + e sin for each pair (e, o) = (x[2i], x[2i + 1]).

    x: [..., R]; cos, sin: broadcastable to [..., R / 2], fp32. Returns [..., R] of x's dtype, new, pairs interleaved.
    Rounds: once, at the end.
    """
    pairs = x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
