"""The routed experts' gated MLPs, weighed and summed."""

from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.moe_experts import cpu, native, reference
from glm_runtime.packed_matrix import Operand, PackedMatrix, plain

__all__ = ["moe_experts"]


def moe_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Operand, down: Operand, *, gemm: Products, impl: Impl | None = None
) -> Tensor:
    """Apply each row's experts. See `reference.py`. Native for packed weights, gate_up packed as gated; else they are unpacked.

    Raises ValueError for shapes that do not fit together.
    """
    num_experts, double_inner, hidden = gate_up.shape
    check_shape("moe_experts", "x", x, (-1, hidden))
    check_shape("moe_experts", "chosen", chosen, (x.shape[0], -1))
    check_shape("moe_experts", "gates", gates, tuple(chosen.shape))
    if tuple(down.shape) != (num_experts, hidden, double_inner // 2):
        raise ValueError(f"moe_experts: down has shape {list(down.shape)}; expected {[num_experts, hidden, double_inner // 2]}")
    chosen_impl = choose_impl(impl, x)
    if chosen_impl == "native" and isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix):
        return native.moe_experts(x, chosen, gates, gate_up, down)
    if chosen_impl == "reference":
        return reference.moe_experts(x, chosen, gates, plain(gate_up), plain(down))
    return cpu.moe_experts(x, chosen, gates, plain(gate_up), plain(down), gemm)
