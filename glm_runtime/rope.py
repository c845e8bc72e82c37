"""Rotary positions in GLM's form: interleaved pairs (2i, 2i + 1), for MLA and for the indexer alike, from one table.

Rotated pairs stay where they are. transformers returns all even parts, then all odd parts; dot products agree, bytes do not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position below the longest sequence: [positions, R / 2] fp32 each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, num_positions: int, rope_dim: int, theta: float) -> "RopeTable":
        """angle(p, i) = p * theta^(-2i / R), i < R / 2.

        Rounds: once, from fp64; an angle computed in fp32 is wrong by up to 0.05 rad near position 1M.
        """
        frequencies = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
        return cls(angles.cos().float(), angles.sin().float())

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin rows of `positions` [T]: [T, R / 2] fp32 each, new."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """e' = e cos - o sin, o' = o cos + e sin for each pair (e, o) = (x[2i], x[2i + 1]).

    x: [..., R]; cos, sin: broadcastable to [..., R / 2], fp32. Returns [..., R] of x's dtype, new, pairs interleaved.
    Rounds: once, at the end.
    """
    pairs = x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
