"""The compiled form: the largest is taken once per expert to choose; nothing is sorted but the result. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.moe_route.reference import Routing


def moe_route(logits: Tensor, bias: Tensor, routing: Routing, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contract: `reference.moe_route`. exp is the kernels' own: scores may differ from torch's in the last bit.

    Raises ValueError for a forced expert that does not exist.
    """
    num_rows, num_experts = logits.shape
    if forced is not None:
        forced = forced.contiguous()
        if forced.numel() and int(forced.max()) >= num_experts:
            raise ValueError(f"moe_route: forced names expert {int(forced.max())}; there are {num_experts}")
    logits, bias = logits if logits.stride(1) == 1 else logits.contiguous(), bias.contiguous()
    chosen = torch.empty(num_rows, routing.num_chosen, dtype=torch.int64)
    gates = torch.empty(num_rows, routing.num_chosen)
    library().glm_moe_route(
        logits.data_ptr(), logits.stride(0), bias.data_ptr(), None if forced is None else forced.data_ptr(),
        chosen.data_ptr(), gates.data_ptr(), num_rows, num_experts, routing.num_chosen, routing.num_groups, routing.num_chosen_groups,
        routing.is_normalised, routing.scale,
    )  # fmt: skip
    return chosen, gates
