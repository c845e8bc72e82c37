"""The specification of the router. Everything is fp32.

Legend: `T` rows, `E` experts, `G` groups, `k` chosen experts. Ties: larger score first, then smaller expert (or group) number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.activation import sigmoid


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The router's constants, from the config."""

    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    is_normalised: bool
    scale: float


def moe_route(logits: Tensor, bias: Tensor, routing: Routing, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """s = sigmoid(logits); chosen = top-k of s + b within the best groups; g = s[chosen] / (sum + 1e-20) * scale.

    The bias selects and never weighs. A group's score is the sum of its two largest biased scores. Source: FACTS 3.8.
    logits: [T, E] fp32; bias: [E] fp32; forced: [T, k] int64, experts to take instead of the chosen ones, -1 in a row's first
    column leaves that row alone. Returns chosen [T, k] int64, ascending, and gates [T, k] fp32, both new.
    Rounds: nothing below fp32; the sum runs over ascending experts.
    """
    scores = sigmoid(logits)
    biased = scores + bias
    if routing.num_groups > 1:
        biased = _keep_best_groups(biased, routing)
    chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen]
    if forced is not None:
        chosen = torch.where(forced[:, :1] >= 0, forced, chosen)
    chosen = chosen.sort(dim=-1).values
    gates = scores.gather(1, chosen)
    if routing.is_normalised:
        total = gates[:, 0].clone()
        for column in range(1, routing.num_chosen):
            total += gates[:, column]
        gates = gates / (total + 1e-20)[:, None]
    return chosen, gates * routing.scale


def _keep_best_groups(biased: Tensor, routing: Routing) -> Tensor:
    grouped = biased.view(biased.shape[0], routing.num_groups, -1)  # [T, G, E / G]
    best_two = grouped.sort(dim=-1, descending=True).values[..., :2]
    group_scores = best_two[..., 0] + best_two[..., 1]
    dropped = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, routing.num_chosen_groups :]
    is_dropped = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, dropped, True)
    return grouped.masked_fill(is_dropped[..., None], float("-inf")).flatten(1)
