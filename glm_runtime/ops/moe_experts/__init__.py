"""The routed experts' gated MLPs, weighed and summed."""

from torch import Tensor

from glm_runtime.linear import Products
from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.moe_experts import cpu, reference

__all__ = ["moe_experts"]


def moe_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, *, gemm: Products, impl: Impl | None = None
) -> Tensor:
    """Apply each row's experts. See `reference.py`. Raises ValueError for shapes that do not fit together."""
    num_experts, double_inner, hidden = gate_up.shape
    check_shape("moe_experts", "x", x, (-1, hidden))
    check_shape("moe_experts", "chosen", chosen, (x.shape[0], -1))
    check_shape("moe_experts", "gates", gates, tuple(chosen.shape))
    check_shape("moe_experts", "down", down, (num_experts, hidden, double_inner // 2))
    if choose_impl(impl, x) == "cpu":
        return cpu.moe_experts(x, chosen, gates, gate_up, down, gemm)
    return reference.moe_experts(x, chosen, gates, gate_up, down)
