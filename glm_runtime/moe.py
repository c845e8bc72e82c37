"""The feed-forward half of a layer: one gated MLP, or routed experts beside a shared one.

Of several tensor ranks each has inner columns of every MLP, and what it returns is its part of the sum over ranks. Where experts are
parallel a rank has whole routed experts instead, and of every row's experts it computes those that it has.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.numerics import Numerics
from glm_runtime.ops.moe_experts import moe_experts
from glm_runtime.ops.moe_route import Routing, moe_route
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.expert import dispatch_experts, part_of, starting_placement
from glm_runtime.parallel.expert_balance import ExpertShelf
from glm_runtime.weights import MlpWeights, MoeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """y = W_down (silu(W_gate x) * W_up x)."""

    weights: MlpWeights
    numerics: Numerics

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [T, hidden]. Returns the same shape, new: this tensor rank's part."""
        gemm = self.numerics.gemm
        return gemm.linear(gemm.gated(hidden, self.weights.gate_up), self.weights.down)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """y = sum over the row's experts of gate * expert(x), plus the shared expert, which is not scaled."""

    config: GlmConfig
    weights: MoeWeights
    numerics: Numerics
    context: ParallelContext

    def forward(self, hidden: Tensor, forced_experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden: [T, hidden]. forced_experts: as `moe_route`.

        Returns the two summands of y, new: the routed experts' weighed sum, fp32, and the shared expert's output, of this tensor rank.
        Whoever adds them to the residual stream rounds the first, then both sums (`add_rms_norm`).
        """
        gemm = self.numerics.gemm
        logits = gemm.linear(hidden.float(), self.weights.router)  # fp32, whatever the runtime's dtype
        chosen, gates = moe_route(logits, self.weights.bias, self.routing, forced_experts, impl=self.numerics.impl)
        return self.routed(hidden, chosen, gates), self.shared.forward(hidden)

    def routed(self, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """[T, hidden] fp32, new: the weighed sum over each row's experts, as far as it is this tensor rank's to give.

        Where all ranks have the same rows nothing travels: each computes what it has, and the sum over tensor ranks completes it. Where
        ranks have different rows, each sends its own to their experts; of rows that tensor ranks have in common each takes a part.
        """
        if self.shelf is None:
            return self.local(hidden, chosen, gates)
        self.shelf.count(chosen)
        placement = self.shelf.placement
        if not self.context.layout.shards_rows:
            return self.local(hidden, placement.here(chosen, self.context.world.rank), gates)
        own = part_of(hidden.shape[0], self.context.tensor.size, self.context.tensor.rank)
        routed = torch.zeros(hidden.shape, dtype=torch.float32)
        routed[own] = dispatch_experts(hidden[own], chosen[own], gates[own], placement, self.context.world, self.local)
        return routed

    def join(self) -> None:
        """Take part in other workers' pass without rows: this rank's experts compute what is sent to them."""
        assert self.shelf is not None, "only where rows travel to their experts is a pass everybody's"
        rows = torch.empty(0, self.config.hidden_size, dtype=self.numerics.dtype)
        chosen = torch.empty(0, self.config.num_experts_per_tok, dtype=torch.int64)
        dispatch_experts(rows, chosen, chosen.float(), self.shelf.placement, self.context.world, self.local)

    def local(self, hidden: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
        """The experts of this rank, by slot: `LocalExperts`."""
        experts, numerics = self.weights.experts, self.numerics
        return moe_experts(hidden, slots, gates, experts.gate_up, experts.down, gemm=numerics.gemm, impl=numerics.impl)

    @cached_property
    def shelf(self) -> ExpertShelf | None:
        """Which rank has which experts, and those of this one; None where every rank has all of them, or parts."""
        layout = self.context.layout
        if layout.ep_size == 1:
            return None
        return ExpertShelf(self.weights.experts, starting_placement(self.config.n_routed_experts, layout))

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
