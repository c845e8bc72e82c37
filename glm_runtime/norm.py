"""The two norms of GLM. Statistics are fp32 whatever the input's dtype; the product is rounded once, at the end."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = w * x / sqrt(mean(x^2) + eps) over the last axis. Source: GlmMoeDsaRMSNorm, transformers 5.24.

    x: [..., D] any float dtype; weight: [D]. Returns [..., D] of x's dtype, new.
    Rounds: once, to x's dtype, after the product with the weight (transformers rounds before it: at most 1 bf16 ulp apart).
    """
    wide = x.float()
    scale = 1.0 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = w * (x - mean) / sqrt(var + eps) + b over the last axis; the indexer's key norm. Shapes and rounding as `rms_norm`."""
    wide = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return wide.to(x.dtype)
