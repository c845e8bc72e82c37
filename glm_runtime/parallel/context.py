"""One rank's place in its replica, passed to whatever must know it: never global."""

from collections.abc import Mapping
from dataclasses import dataclass

from glm_runtime.parallel.collectives import Collectives, CommunicationMeter
from glm_runtime.parallel.layout import GroupKind, ParallelLayout, RankPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelContext:
    """The layout, this rank's number in it, and the groups that it is in. meter: of all groups."""

    layout: ParallelLayout
    rank: int
    groups: Mapping[GroupKind, Collectives]
    meter: CommunicationMeter

    @property
    def place(self) -> RankPlace:
        """What the rank's number means."""
        return self.layout.place(self.rank)

    @property
    def world(self) -> Collectives:
        """All ranks of the replica; those of the experts, where these are spread."""
        return self.groups[GroupKind.WORLD]

    @property
    def worker(self) -> Collectives:
        """The ranks of one worker id, which run one scheduler's plans."""
        return self.groups[GroupKind.WORKER]

    @property
    def tensor(self) -> Collectives:
        """Ranks that share the same rows' work."""
        return self.groups[GroupKind.TENSOR]

    @property
    def decode_context(self) -> Collectives:
        """Ranks that share a sequence's cache."""
        return self.groups[GroupKind.DECODE_CONTEXT]

    @property
    def prefill_context(self) -> Collectives:
        """Ranks that share a prefill's rows."""
        return self.groups[GroupKind.PREFILL_CONTEXT]

    @property
    def data(self) -> Collectives:
        """The same rank of the other workers of the replica."""
        return self.groups[GroupKind.DATA]

    @property
    def leads(self) -> bool:
        """Whether this rank runs its worker's scheduler and draws its tokens."""
        return self.rank % self.layout.num_worker_ranks == 0


def one_rank() -> ParallelContext:
    """The context of a replica of one rank: every group has one member."""
    meter = CommunicationMeter()
    groups = {kind: Collectives(kind, 0, 1, None, meter) for kind in GroupKind}
    return ParallelContext(layout=ParallelLayout(), rank=0, groups=groups, meter=meter)
