"""Routed experts as two matrix products per expert that any row chose. Contract: `reference.py`.

Rows are sorted by expert into segments that start at multiples of the row tile, so that a product never mixes experts and its
padding is already in place. Sums run in the order of a row's own list, so a row does not see who else chose its experts. What is elsewhere
takes one more segment, of zeros.
"""

import torch
from torch import Tensor

from glm_runtime.activation import silu
from glm_runtime.linear import Products


def moe_experts(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, gemm: Products) -> Tensor:
    """Contract: `reference.moe_experts`."""
    num_rows, num_chosen = chosen.shape
    num_experts = gate_up.shape[0]
    flat = chosen.reshape(-1)
    flat = torch.where(flat < 0, num_experts, flat)
    counts = torch.bincount(flat, minlength=num_experts + 1)
    padded = counts + (-counts % gemm.row_tile)
    ends = padded.cumsum(0)
    order = flat.sort(stable=True).indices  # assignments by expert
    rank = torch.arange(flat.shape[0]) - (counts.cumsum(0) - counts)[flat[order]]
    places = torch.empty_like(flat)
    places[order] = (ends - padded)[flat[order]] + rank

    grouped = x.new_zeros(int(ends[-1]), x.shape[1])
    grouped[places] = x.repeat_interleave(num_chosen, dim=0)
    grouped[int(ends[-2]) :] = 0.0
    segments = list(zip(padded.tolist(), ends.tolist(), strict=True))[:num_experts]
    hits = [(expert, end - size, end) for expert, (size, end) in enumerate(segments) if size]
    inner = grouped.new_empty(grouped.shape[0], gate_up.shape[1])
    for expert, start, end in hits:
        inner[start:end] = gemm.linear(grouped[start:end], gate_up[expert])
    gated, linear = inner.chunk(2, dim=1)
    activated = silu(gated) * linear
    for expert, start, end in hits:
        grouped[start:end] = gemm.linear(activated[start:end], down[expert])

    weighed = grouped[places].float().view(num_rows, num_chosen, x.shape[1]) * gates[..., None]
    total = weighed[:, 0].clone()
    for column in range(1, num_chosen):
        total += weighed[:, column]
    return total
