"""The router's choice of experts and their weights."""

from torch import Tensor

from glm_runtime.ops.impl import check_shape
from glm_runtime.ops.moe_route import reference
from glm_runtime.ops.moe_route.reference import Routing

__all__ = ["Routing", "moe_route"]


def moe_route(logits: Tensor, bias: Tensor, routing: Routing, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for each row. See `reference.py`, which is fast enough to serve with.

    Raises ValueError for shapes that do not fit together.
    """
    check_shape("moe_route", "bias", bias, (logits.shape[1],))
    if forced is not None:
        check_shape("moe_route", "forced", forced, (logits.shape[0], routing.num_chosen))
    return reference.moe_route(logits, bias, routing, forced)
