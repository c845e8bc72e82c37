"""What two workers must agree on before a byte moves between them. Pure; the shells of the workers carry the messages.

Knows: PairHello's offer, why one is refused, and what it says of each rank. Does not know agents (`transports/`) or when to try again
(the workers). How a peer is cut into ranks need not be how we are: `geometry.py` says what moves where.
"""

from dataclasses import dataclass

import msgspec

from kv_transfer.errors import LayoutMismatch
from kv_transfer.geometry import ONE_RANK, CacheSharding, PoolGeometry
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import PeerOffer, RankOffer
from kv_transfer.pool_memory import NUM_PROBE_BLOCKS, PoolMemory
from kv_transfer.transports.base import AgentDescription

ADDRESS_END = 1 << 64
MOST_BLOCKS = 1 << 24
"""More than any rank's pool has; a peer's word for how many descriptors are made here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTerms:
    """The part of a worker's offer that is the same for every peer. base_address, num_blocks: of rank 0's pool."""

    layout: CacheLayout
    weights_version: str
    base_address: int
    block_bytes: int
    num_blocks: int
    sharding: CacheSharding = ONE_RANK
    numerics: str = ""
    kernels: str = ""

    @classmethod
    def of_pool(
        cls,
        layout: CacheLayout,
        weights_version: str,
        memory: PoolMemory,
        *,
        sharding: CacheSharding = ONE_RANK,
        numerics: str = "",
        kernels: str = "",
    ) -> "PairTerms":
        """The terms of a worker whose rank 0 has this pool."""
        return cls(
            layout=layout,
            weights_version=weights_version,
            base_address=memory.base_address,
            block_bytes=memory.block_bytes,
            num_blocks=memory.num_blocks,
            sharding=sharding,
            numerics=numerics,
            kernels=kernels,
        )

    def offer(self, agent: AgentDescription) -> PeerOffer:
        """The offer to the peer that `agent` was made for."""
        assert len(agent.other_ranks) == self.sharding.num_ranks - 1, (
            f"agents of {1 + len(agent.other_ranks)} ranks were made, of {self.sharding.num_ranks}"
        )
        return PeerOffer(
            fingerprint=self.layout.fingerprint,
            layout=self.layout,
            weights_version=self.weights_version,
            num_ranks=self.sharding.num_ranks,
            agent_name=agent.name,
            agent_epoch=agent.epoch,
            agent_metadata=agent.metadata,
            base_address=self.base_address,
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            numerics=self.numerics,
            kernels=self.kernels,
            num_homes=self.sharding.num_homes,
            other_ranks=agent.other_ranks,
        )


def check_offer(mine: PairTerms, theirs: PeerOffer) -> None:
    """Raise LayoutMismatch, saying what differs, when the peer's blocks would mean something else here, or its offer makes no sense.

    The number of ranks, the homes of blocks and the sizes of pools may differ.
    """
    facts = {
        "cache layout": (mine.layout.fingerprint, theirs.fingerprint),
        "layout manifest": (theirs.fingerprint, theirs.layout.fingerprint),
        "weights version": (mine.weights_version, theirs.weights_version),
        "bytes per block": (mine.block_bytes, theirs.block_bytes),
    }
    for what, (here, there) in facts.items():
        if here != there:
            raise LayoutMismatch(
                f"{what} differs: {here} here, {there} at the peer; both workers must serve the same checkpoint in the same cache format",
                expected=here,
                actual=there,
            )
    check_ranks(theirs)


def check_ranks(offer: PeerOffer) -> None:
    """Raise LayoutMismatch when what an offer says of its ranks cannot be: a peer's word, before anything is built from it."""
    sharding_of(offer)
    if len(offer.other_ranks) != offer.num_ranks - 1:
        raise LayoutMismatch(f"the peer has {offer.num_ranks} ranks and describes {1 + len(offer.other_ranks)}")
    agents = [offer.agent_name, *(other.agent_name for other in offer.other_ranks)]
    if len(set(agents)) < len(agents):
        raise LayoutMismatch(f"ranks of the peer have agents of the same name: {sorted(agents)}")
    for rank in range(offer.num_ranks):
        pool = PoolGeometry.of_offer(offer_of_rank(offer, rank))
        end = pool.base_address + (pool.num_blocks + NUM_PROBE_BLOCKS) * pool.block_bytes
        is_pool = 0 < pool.num_blocks <= MOST_BLOCKS and pool.block_bytes > 0 and pool.device_id >= 0
        if not is_pool or not 0 <= pool.base_address < end <= ADDRESS_END:
            raise LayoutMismatch(
                f"rank {rank} of the peer describes no pool: {pool.num_blocks} blocks of {pool.block_bytes} bytes "
                f"from {pool.base_address:#x} on device {pool.device_id}"
            )


def sharding_of(offer: PeerOffer) -> CacheSharding:
    """How the peer's blocks lie on its ranks. Raises LayoutMismatch for what cannot be."""
    return CacheSharding(offer.num_ranks, offer.num_homes)


def offer_of_rank(offer: PeerOffer, rank: int) -> PeerOffer:
    """What a transport needs of one rank of the peer: the offer of a worker of that rank alone."""
    if rank == 0:
        return msgspec.structs.replace(offer, num_ranks=1, num_homes=1, other_ranks=())
    other: RankOffer = offer.other_ranks[rank - 1]
    return msgspec.structs.replace(
        offer,
        num_ranks=1,
        num_homes=1,
        other_ranks=(),
        agent_name=other.agent_name,
        agent_metadata=other.agent_metadata,
        base_address=other.base_address,
        num_blocks=other.num_blocks,
        device_id=other.device_id,
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
