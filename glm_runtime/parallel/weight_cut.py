"""Which part of each weight one rank has: the one home of how the model is cut. Torch is not imported.

By heads: q_b and kv_b (rows), o_proj (columns). By inner columns: gate and up (rows), down (columns). By tokens: embedding and head (rows).
By experts: whole ones, where experts are parallel. Everything else is on every rank. Source: FACTS 6.1, 6.2.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glm_runtime.parallel.layout import ParallelLayout

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class Part(NamedTuple):
    """Part `number` of `size` equal, neighbouring ones."""

    number: int
    size: int

    def of(self, count: int) -> slice:
        """The part of `count` things. The layout has been checked: it divides them."""
        width = count // self.size
        return slice(self.number * width, (self.number + 1) * width)


WHOLE = Part(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCut:
    """heads: attended outputs and o_proj. query_heads: queries and absorbed keys; with heads of other ranks where these are replicated in
    a decode context group. columns: of dense and shared MLPs; expert_columns: of each routed expert. vocabulary: of the head.
    experts: those that are here, by slot; None is all of them, in order.
    """

    heads: Part = WHOLE
    query_heads: Part = WHOLE
    columns: Part = WHOLE
    expert_columns: Part = WHOLE
    vocabulary: Part = WHOLE
    embedding: Part = WHOLE
    experts: tuple[int, ...] | None = None

    @property
    def own_query_heads(self) -> Part:
        """Of `query_heads`, those of `heads`."""
        ratio = self.heads.size // self.query_heads.size
        return Part(self.heads.number % ratio, ratio)

    def parts(self, name: str) -> tuple[Part, Part]:
        """Which rows and which columns of a checkpoint's tensor are here."""
        rows, columns = _CUTS.get(".".join(name.split(".")[-2:]), (None, None))
        if _EXPERT.search(name):
            return (self.expert_columns if rows else WHOLE, self.expert_columns if columns else WHOLE)
        return (getattr(self, rows) if rows else WHOLE, getattr(self, columns) if columns else WHOLE)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor's part, from that of the whole."""
        return tuple(count // part.size for count, part in zip(shape, self.parts(name), strict=False))

    def has(self, name: str) -> bool:
        """Whether anything of a checkpoint's tensor, or of one that lies beside it, is here."""
        found = _EXPERT.search(name)
        return self.experts is None or found is None or int(found[1]) in self.experts


_CUTS: dict[str, tuple[str | None, str | None]] = {
    "q_b_proj.weight": ("query_heads", None),
    "kv_b_proj.weight": ("query_heads", None),
    "o_proj.weight": (None, "heads"),
    "gate_proj.weight": ("columns", None),
    "up_proj.weight": ("columns", None),
    "down_proj.weight": (None, "columns"),
    "embed_tokens.weight": ("embedding", None),
    "lm_head.weight": ("vocabulary", None),
}
"""By the end of a tensor's name, the fields of `WeightCut` that cut its rows and its columns."""


def cut_weights(layout: ParallelLayout, rank: int, experts: Sequence[int] | None = None) -> WeightCut:
    """What rank `rank` has. experts: those of its slots where experts are parallel; None elsewhere."""
    assert (experts is not None) == (layout.ep_size > 1), "a rank has experts of its own where they are spread"
    place = layout.place(rank)
    tensor = Part(place.tensor, layout.tp_size)
    group = Part(place.tensor // layout.dcp_size, layout.tp_size // layout.dcp_size)
    return WeightCut(
        heads=tensor,
        query_heads=group if layout.replicates_queries else tensor,
        columns=tensor,
        expert_columns=WHOLE if experts is not None else tensor,
        vocabulary=tensor,
        embedding=WHOLE if layout.replicates_embedding else tensor,
        experts=tuple(experts) if experts is not None else None,
    )
