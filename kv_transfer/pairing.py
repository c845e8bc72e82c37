"""What two workers must agree on before a byte moves between them. Pure; the shells of the workers carry the messages.

Knows: PairHello's offer and why one is refused. Does not know agents (`transports/`) or when to try again (the workers).
"""

from dataclasses import dataclass

from kv_transfer.errors import LayoutMismatch
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import PeerOffer
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import AgentDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTerms:
    """The part of a worker's offer that is the same for every peer."""

    layout: CacheLayout
    weights_version: str
    num_ranks: int
    base_address: int
    block_bytes: int
    num_blocks: int
    numerics: str = ""
    kernels: str = ""

    @classmethod
    def of_pool(
        cls, layout: CacheLayout, weights_version: str, memory: PoolMemory, *, numerics: str = "", kernels: str = ""
    ) -> "PairTerms":
        """The terms of a worker of one rank with this pool."""
        return cls(
            layout=layout,
            weights_version=weights_version,
            num_ranks=1,
            base_address=memory.base_address,
            block_bytes=memory.block_bytes,
            num_blocks=memory.num_blocks,
            numerics=numerics,
            kernels=kernels,
        )

    def offer(self, agent: AgentDescription) -> PeerOffer:
        """The offer to the peer that `agent` was made for."""
        return PeerOffer(
            fingerprint=self.layout.fingerprint,
            layout=self.layout,
            weights_version=self.weights_version,
            num_ranks=self.num_ranks,
            agent_name=agent.name,
            agent_epoch=agent.epoch,
            agent_metadata=agent.metadata,
            base_address=self.base_address,
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            numerics=self.numerics,
            kernels=self.kernels,
        )


def check_offer(mine: PairTerms, theirs: PeerOffer) -> None:
    """Raise LayoutMismatch, saying what differs, when the peer's blocks would mean something else here."""
    facts = {
        "cache layout": (mine.layout.fingerprint, theirs.fingerprint),
        "layout manifest": (theirs.fingerprint, theirs.layout.fingerprint),
        "weights version": (mine.weights_version, theirs.weights_version),
        "number of ranks": (mine.num_ranks, theirs.num_ranks),
        "bytes per block": (mine.block_bytes, theirs.block_bytes),
    }
    for what, (here, there) in facts.items():
        if here != there:
            raise LayoutMismatch(
                f"{what} differs: {here} here, {there} at the peer; both workers must serve the same checkpoint in the same cache format",
                expected=here,
                actual=there,
            )


def describe_other_bits(mine: PairTerms, theirs: PeerOffer) -> str | None:
    """Why the same request may get other tokens here than at the peer, though both are deterministic, and what to do; None if it cannot.

    No reason to refuse: blocks mean the same on both sides. Each kind of kernels is deterministic, but they add in different orders.
    """
    if mine.numerics != "deterministic" or theirs.numerics != "deterministic" or mine.kernels == theirs.kernels:
        return None
    return (
        f"kernels are {mine.kernels} here and {theirs.kernels} at the peer, whose sums differ in the last bits: a request that moves or is "
        f"retried may go on with other tokens; set runtime.kernels explicitly, to 'native' or 'torch' on all workers"
    )
