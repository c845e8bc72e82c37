"""How a replica is cut into ranks: the sizes, what each rank's number means, and who meets in which group. Pure.

Ranks count tensor parallelism fastest, then prefill context, then data: rank = (data * pcp_size + prefill) * tp_size + tensor. Decode
context groups are runs of neighbours inside a tensor group. Source: FACTS 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Literal, NamedTuple

from glm_runtime.config import GlmConfig
from kv_transfer.errors import ConfigError

CombineChoice = Literal["a2a", "ag_rs"]


@unique
class GroupKind(Enum):
    """Ranks that meet for one purpose.

    TENSOR: parts of the same rows' work. DECODE_CONTEXT: every dcp_size-th block each. PREFILL_CONTEXT: parts of the same prompts' rows.
    WORKER: all ranks of one worker id. DATA: the same part of other workers. WORLD: all ranks of the replica.
    """

    WORLD = "world"
    WORKER = "worker"
    TENSOR = "tensor"
    DECODE_CONTEXT = "decode_context"
    PREFILL_CONTEXT = "prefill_context"
    DATA = "data"


class RankPlace(NamedTuple):
    """What a rank's number means: its number in each group. decode: of its decode context group, inside the tensor group."""

    data: int
    prefill: int
    tensor: int
    decode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """tp_size: ranks that share heads, intermediate columns and the vocabulary. pcp_size: that share a prefill's rows. dcp_size: that
    share a sequence's cache, of each tensor group. dp_size: workers whose attention is their own, with experts in common.

    is_expert_parallel: whole experts on each rank of the replica; else each tensor group cuts every expert. dcp_combine: "a2a"
    exchanges outputs and log-sums once, "ag_rs" gathers log-sums and scatters outputs. replicates_queries: q_b and W_UK whole in a decode
    context group, so that nobody gathers queries. replicates_embedding: else the vocabulary is cut and rows are summed.
    num_redundant_experts: further slots of each rank, for copies of the experts that are asked for most.
    """

    tp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    dp_size: int = 1
    is_expert_parallel: bool = False
    dcp_combine: CombineChoice = "a2a"
    replicates_queries: bool = True
    replicates_embedding: bool = False
    num_redundant_experts: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole replica."""
        return self.tp_size * self.pcp_size * self.dp_size

    @property
    def ep_size(self) -> int:
        """Ranks over which the experts are spread; 1 where they are not."""
        return self.num_ranks if self.is_expert_parallel else 1

    @property
    def num_worker_ranks(self) -> int:
        """Ranks of one worker id: with data parallelism each part is a worker of its own."""
        return self.tp_size * self.pcp_size

    @property
    def shards_rows(self) -> bool:
        """Whether ranks compute different rows, so that rows must travel to their experts."""
        return self.pcp_size > 1 or self.dp_size > 1

    def place(self, rank: int) -> RankPlace:
        """The meaning of a rank's number. Raises ValueError for one that the layout does not have."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not of {self.num_ranks}")
        data, inner = divmod(rank, self.num_worker_ranks)
        prefill, tensor = divmod(inner, self.tp_size)
        return RankPlace(data, prefill, tensor, tensor % self.dcp_size)

    def members(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets in this kind of group, itself included, ascending: a rank's number in the group is its index."""
        own = self.place(rank)
        return tuple(other for other in range(self.num_ranks) if _meet(kind, own, self.place(other), self.dcp_size))

    def describe(self) -> str:
        """Short name for people: "tp4 dcp4 ep", "pcp2", "one rank"."""
        sizes = {"tp": self.tp_size, "pcp": self.pcp_size, "dcp": self.dcp_size, "dp": self.dp_size}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1] + (["ep"] if self.ep_size > 1 else [])
        return " ".join(parts) or "one rank"


def _meet(kind: GroupKind, own: RankPlace, other: RankPlace, dcp_size: int) -> bool:
    is_worker, is_row = own.data == other.data, own.prefill == other.prefill
    match kind:
        case GroupKind.WORLD:
            return True
        case GroupKind.WORKER:
            return is_worker
        case GroupKind.TENSOR:
            return is_worker and is_row
        case GroupKind.DECODE_CONTEXT:
            return is_worker and is_row and own.tensor // dcp_size == other.tensor // dcp_size
        case GroupKind.PREFILL_CONTEXT:
            return is_worker and own.tensor == other.tensor
        case GroupKind.DATA:
            return is_row and own.tensor == other.tensor


def check_layout(layout: ParallelLayout, config: GlmConfig, path: str = "runtime.parallel") -> None:
    """Refuse what cannot run. Raises ConfigError that names the field below `path` and the numbers."""
    for name in ("tp_size", "pcp_size", "dcp_size", "dp_size"):
        if getattr(layout, name) < 1:
            raise ConfigError(f"is {getattr(layout, name)}; expected at least 1", path=f"{path}.{name}")
    if layout.pcp_size > 1 and layout.dcp_size > 1:
        raise ConfigError(
            f"is {layout.pcp_size} with dcp_size {layout.dcp_size}; prefill workers take pcp_size, decode workers dcp_size, none both",
            path=f"{path}.pcp_size",
        )
    if layout.tp_size % layout.dcp_size:
        raise ConfigError(f"is {layout.dcp_size}; it must divide tp_size, {layout.tp_size}", path=f"{path}.dcp_size")
    if layout.dp_size > 1 and not layout.is_expert_parallel:
        raise ConfigError(
            f"is {layout.dp_size} without is_expert_parallel: nothing would be shared; run {layout.dp_size} workers instead",
            path=f"{path}.dp_size",
        )
    if layout.dcp_combine not in ("a2a", "ag_rs"):
        raise ConfigError(f"is {layout.dcp_combine!r}; expected 'a2a' or 'ag_rs'", path=f"{path}.dcp_combine")
    most = config.n_routed_experts - config.n_routed_experts // layout.ep_size
    if not 0 <= layout.num_redundant_experts <= most or (layout.num_redundant_experts and layout.ep_size == 1):
        raise ConfigError(
            f"is {layout.num_redundant_experts}; expected 0 to {most} with is_expert_parallel, 0 without",
            path=f"{path}.num_redundant_experts",
        )
    cuts: list[tuple[str, int, str, int]] = [
        ("num_attention_heads", config.num_attention_heads, "tp_size", layout.tp_size),
        ("vocab_size", config.vocab_size, "tp_size", layout.tp_size),
        ("intermediate_size", config.intermediate_size, "tp_size", layout.tp_size),
        ("moe_intermediate_size", config.moe_intermediate_size, "tp_size", layout.tp_size),
        ("n_routed_experts", config.n_routed_experts, "ep_size", layout.ep_size),
    ]
    for what, count, name, size in cuts:
        if count % size:
            raise ConfigError(f"{name} is {size}, which does not divide the model's {what}, {count}", path=path)


def parts_of(count: int, size: int) -> Sequence[slice]:
    """`size` equal neighbouring parts of `count` things, in order of the ranks that have them. Raises ValueError if it does not divide."""
    if count % size:
        raise ValueError(f"{count} cannot be cut into {size} equal parts")
    width = count // size
    return [slice(part * width, (part + 1) * width) for part in range(size)]
