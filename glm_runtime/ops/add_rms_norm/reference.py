"""The specification of residual sum and norm. Legend: `T` rows, `H` hidden size."""

from torch import Tensor

from glm_runtime.norm import rms_norm


def add_rms_norm(residual: Tensor, owed: tuple[Tensor, ...], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h = round(residual + o), y = RMS(h) with o = round(o1), or round(round(o1) + round(o2)). Source: FACTS 3.2.

    residual: [T, H] in the runtime's dtype. owed: up to two summands [T, H], of that dtype or fp32 — what the segment before left to
    add: attention's output, or the routed and the shared experts'. weight: [H]. Returns (h, y), both of residual's dtype; h is new, or
    `residual` itself when nothing is owed.
    Rounds: every summand and every sum to residual's dtype, so the norm reads the stream as it is kept; y once, as `rms_norm`.
    """
    if owed:
        total = owed[0].to(residual.dtype)
        for summand in owed[1:]:
            total = total + summand.to(residual.dtype)
        residual = residual + total
    return residual, rms_norm(residual, weight, eps)
