"""The feed-forward half of a layer: one gated MLP, or routed experts beside a shared one."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.numerics import Numerics
from glm_runtime.ops.moe_experts import moe_experts
from glm_runtime.ops.moe_route import Routing, moe_route
from glm_runtime.weights import MlpWeights, MoeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """y = W_down (silu(W_gate x) * W_up x)."""

    weights: MlpWeights
    numerics: Numerics

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [T, hidden]. Returns the same shape, new."""
        gemm = self.numerics.gemm
        return gemm.linear(gemm.gated(hidden, self.weights.gate_up), self.weights.down)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """y = sum over the row's experts of gate * expert(x), plus the shared expert, which is not scaled."""

    config: GlmConfig
    weights: MoeWeights
    numerics: Numerics

    def forward(self, hidden: Tensor, forced_experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden: [T, hidden]. forced_experts: as `moe_route`.

        Returns the two summands of y, new: the routed experts' weighed sum, fp32, and the shared expert's output. Whoever adds them
        to the residual stream rounds the first, then both sums (`add_rms_norm`).
        """
        gemm = self.numerics.gemm
        logits = gemm.linear(hidden.float(), self.weights.router)  # fp32, whatever the runtime's dtype
        chosen, gates = moe_route(logits, self.weights.bias, self.routing, forced_experts, impl=self.numerics.impl)
        routed = moe_experts(hidden, chosen, gates, self.weights.gate_up, self.weights.down, gemm=gemm, impl=self.numerics.impl)
        return routed, self.shared.forward(hidden)

    @cached_property
    def shared(self) -> GatedMlp:
        """The expert that every row takes."""
        return GatedMlp(weights=self.weights.shared, numerics=self.numerics)

    @cached_property
    def routing(self) -> Routing:
        """The router's constants."""
        return Routing(
            num_chosen=self.config.num_experts_per_tok,
            num_groups=self.config.n_group,
            num_chosen_groups=self.config.topk_group,
            is_normalised=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
        )
