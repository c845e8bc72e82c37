"""The routed experts as one compiled call. Contract: `reference.py`.

Rounds: what silu(gate) * up makes, once, to x's dtype; products of `down`, weighing and summing stay fp32.
"""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.native_gemm import wide_enough
from glm_runtime.packed_matrix import PackedMatrix


def moe_experts(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
    """Contract: `reference.moe_experts`. Chosen experts must be below E."""
    (num_rows, hidden), num_chosen = x.shape, chosen.shape[1]
    out = torch.empty(num_rows, hidden)
    if num_rows == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    # bf16 rows beside fp32 weights of either product are computed in fp32 throughout.
    x, gate_up_kind = wide_enough(x if down.dtype == torch.bfloat16 else x.float(), gate_up)
    count, inner = num_rows * num_chosen, down.num_inner
    size = x.element_size()
    scratch = torch.empty(count * (size * (hidden + inner) + 4 * hidden), dtype=torch.uint8)
    products = scratch.data_ptr()
    rows = products + 4 * count * hidden
    _, down_kind = wide_enough(x[:0], down)
    chosen, gates = chosen.contiguous(), gates.contiguous()
    library().glm_experts(
        x.data_ptr(), x.stride(0), chosen.data_ptr(), gates.data_ptr(), num_rows, num_chosen,
        gate_up.panels.data_ptr(), gate_up_kind, down.panels.data_ptr(), down_kind, gate_up.shape[0], hidden, inner,
        rows, rows + size * count * hidden, products, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out
