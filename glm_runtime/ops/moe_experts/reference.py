"""The specification of the routed experts.

Legend: `T` rows, `H` hidden size, `I` inner size, `E` experts, `k` chosen experts.
"""

import torch
from torch import Tensor

from glm_runtime.activation import silu


def moe_experts(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """y[t] = sum over j of gates[t, j] * down_e (silu(gate_e x[t]) * up_e x[t]), e = chosen[t, j]. Source: FACTS 3.8.

    x: [T, H]; chosen: [T, k] int64, negative where a row's expert is elsewhere, which adds nothing; gates: [T, k] fp32;
    gate_up: [E, 2 I, H], gate rows first; down: [E, H, I].
    Returns [T, H] fp32, new.
    Rounds: each matrix product and the gated product to x's dtype; weighing and summing are fp32, in order of j.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(x.shape[0]):
        for expert, gate in zip(chosen[row].tolist(), gates[row], strict=True):
            if expert < 0:
                continue
            gated, linear = (gate_up[expert] @ x[row]).chunk(2)
            total[row] += gate * (down[expert] @ (silu(gated) * linear)).float()
    return total
