"""The router's choice of experts and their weights."""

import torch
from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape
from glm_runtime.ops.moe_route import native, reference
from glm_runtime.ops.moe_route.reference import Routing

__all__ = ["Routing", "moe_route"]


def moe_route(
    logits: Tensor, bias: Tensor, routing: Routing, forced: Tensor | None = None, *, impl: Impl | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts for each row. See `reference.py`, which is what serves without compiled kernels.

    Raises ValueError for shapes that do not fit together and for logits or bias that are not fp32.
    """
    num_experts = logits.shape[1]
    check_shape("moe_route", "bias", bias, (num_experts,))
    if logits.dtype is not torch.float32 or bias.dtype is not torch.float32:
        raise ValueError(f"moe_route: logits are {logits.dtype} and bias is {bias.dtype}; expected fp32")
    if num_experts % routing.num_groups or not 0 < routing.num_chosen <= num_experts:
        raise ValueError(f"moe_route: {num_experts} experts in {routing.num_groups} groups, {routing.num_chosen} of them to choose")
    if forced is not None:
        check_shape("moe_route", "forced", forced, (logits.shape[0], routing.num_chosen))
    if impl == "native":
        return native.moe_route(logits, bias, routing, forced)
    return reference.moe_route(logits, bias, routing, forced)
