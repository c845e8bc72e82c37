"""Sigmoid and SiLU by `exp`, so that an element's bits do not depend on its place in a buffer."""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch.sigmoid gives an element other bits in the scalar tail of a buffer than in its vector part."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), for the reason of `sigmoid`; computed in fp32, returned in x's dtype."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)
