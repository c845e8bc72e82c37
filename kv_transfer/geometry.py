"""Where a block's bytes lie, in this process's pool or a peer's, and which rank has a token's cache.

Knows: addresses and byte ranges; which ranks have a block and under which local id; which of them serves it; and what moves between
the ranks of two workers that are cut differently. The one home of (token, component, rank) -> (rank, byte range). Pure. Does not know
what is in a region (`layout.py`), nor how the bytes move (`transports/`).

Sequence  | block 0 | block 1 | block 2 | block 3 | ...
          home i % num_homes: the ranks r with r % num_homes == home have it; rank i % num_ranks, one of them, serves it and READs it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kv_transfer.errors import LayoutMismatch, TransferError
from kv_transfer.identity import BlockId, Incarnation, PeerId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import PeerOffer

MOST_RANKS = 4096
"""More than any worker has: what a peer says about itself is bounded before anything is built from it."""


class BlockCopy(NamedTuple):
    """A block, by its group-wide id, whose bytes only `rank` has; the other ranks that have the block are to copy them."""

    block_id: BlockId
    rank: int


@dataclass(frozen=True, slots=True)
class CacheSharding:
    """How the blocks of one worker lie on its ranks.

    A group-wide block id has one home, `id % num_homes`, and every rank r with `r % num_homes` equal to it has the block, as
    `id // num_homes` of its own pool. num_homes 1: all ranks have every block, under the same id (replicated). num_homes = num_ranks:
    each block is on one rank (by block). Between the two: tensor parallelism over several decode context groups.
    """

    num_ranks: int = 1
    num_homes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_homes <= self.num_ranks <= MOST_RANKS or self.num_ranks % self.num_homes:
            raise LayoutMismatch(
                f"blocks with {self.num_homes} homes cannot lie on {self.num_ranks} ranks: the homes divide 1 to {MOST_RANKS} ranks",
                num_ranks=self.num_ranks,
                num_homes=self.num_homes,
            )

    @classmethod
    def replicated(cls, num_ranks: int) -> "CacheSharding":
        """Every rank has every block: tensor and prefill context parallelism."""
        return cls(num_ranks, 1)

    @classmethod
    def by_block(cls, num_ranks: int) -> "CacheSharding":
        """Every block is on one rank: decode context parallelism."""
        return cls(num_ranks, num_ranks)

    @property
    def kind(self) -> Literal["replicated", "by_block", "by_block, replicated"]:
        """For people."""
        if self.num_homes == 1:
            return "replicated"
        return "by_block" if self.num_copies == 1 else "by_block, replicated"

    @property
    def num_copies(self) -> int:
        """Ranks that have the same block."""
        return self.num_ranks // self.num_homes

    def home(self, block_id: BlockId) -> int:
        """The home of a group-wide block id; also the lowest rank that has it."""
        return block_id % self.num_homes

    def local_id(self, block_id: BlockId) -> BlockId:
        """What the ranks that have the block call it."""
        return BlockId(block_id // self.num_homes)

    def group_id(self, home: int, local_id: BlockId) -> BlockId:
        """Inverse of `home` and `local_id`."""
        return BlockId(local_id * self.num_homes + home)

    def has(self, rank: int, block_id: BlockId) -> bool:
        """Whether this rank has the block."""
        return rank % self.num_homes == self.home(block_id)

    def ranks(self, block_id: BlockId) -> range:
        """The ranks that have the block, ascending."""
        return range(self.home(block_id), self.num_ranks, self.num_homes)

    def copies(self, first_block: int, block_ids: Sequence[BlockId]) -> tuple[BlockCopy, ...]:
        """What other ranks must copy of logical blocks `first_block` and so on, once the ranks that read them have them."""
        if self.num_copies == 1:
            return ()
        return tuple(BlockCopy(block_id, self.serving_rank(index)) for index, block_id in enumerate(block_ids, start=first_block))

    def serving_rank(self, logical_block: int) -> int:
        """The rank that serves this logical block of a sequence to a peer, and READs it from one: the bytes cross the wire once.

        The block's id must have the home `logical_block % num_homes`, as `BlockPool` hands them out.
        """
        return logical_block % self.num_ranks


ONE_RANK = CacheSharding()


def rank_peer(peer: PeerId, rank: int) -> PeerId:
    """How transports call one rank of a worker; rank 0 goes by the worker's own name."""
    return PeerId(f"{peer}/{rank}") if rank else peer


def rank_incarnation(incarnation: Incarnation, rank: int) -> Incarnation:
    """The number whose pattern the probe block of one rank holds: a probe that reached another rank's pool shows."""
    return Incarnation(incarnation ^ (rank << 32))


# -- addresses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of one layer of one component of one block: `rank` has them at `offset_bytes` of its own block `block_id`."""

    rank: int
    block_id: BlockId
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolGeometry:
    """One rank's pool as a peer sees it: `num_blocks` blocks from `base_address` on, then the probe block."""

    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int = 0

    @classmethod
    def of_offer(cls, offer: PeerOffer) -> "PoolGeometry":
        """The pool that rank 0 of a peer described in PairHello."""
        return cls(base_address=offer.base_address, block_bytes=offer.block_bytes, num_blocks=offer.num_blocks, device_id=offer.device_id)

    @property
    def probe_block(self) -> BlockId:
        """The block that holds the pattern of the pool's process."""
        return BlockId(self.num_blocks)

    def descriptor(self, block_id: BlockId) -> tuple[int, int, int]:
        """(address, length in bytes, device id) of one block, the probe block and the landing block included."""
        if not 0 <= block_id < self.num_blocks + 2:
            raise ValueError(f"block {block_id} is not in a pool of {self.num_blocks} blocks")
        return self.base_address + block_id * self.block_bytes, self.block_bytes, self.device_id

    def descriptors(self) -> list[tuple[int, int, int]]:
        """Descriptors of all blocks, then of the probe block and the landing block: index = block id."""
        return [self.descriptor(BlockId(index)) for index in range(self.num_blocks + 2)]


def locate(
    layout: CacheLayout, sharding: CacheSharding, block_table: Sequence[BlockId], token: int, component: str, layer: int, rank: int = 0
) -> Place:
    """Where `rank` finds the cache of token position `token`: in its own pool, or in that of the rank that serves the block.

    block_table: group-wide ids. Raises KeyError when the layout has no such region, IndexError beyond the table.
    """
    region = layout.region(component, layer)
    logical_block = token // layout.block_size_tokens
    block_id = block_table[logical_block]
    owner = rank if sharding.has(rank, block_id) else sharding.serving_rank(logical_block)
    return Place(owner, sharding.local_id(block_id), region.offset_bytes, region.num_bytes)


# -- between two workers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MovePart:
    """What one rank of the sink READs from one rank of the source: own block `sink_ids[i]` becomes block `source_ids[i]`, both local."""

    sink_rank: int
    source_rank: int
    sink_ids: tuple[BlockId, ...]
    source_ids: tuple[BlockId, ...]


def rank_pairs(source: CacheSharding, sink: CacheSharding) -> Iterator[tuple[int, int]]:
    """(sink rank, source rank) of all pairs between which a block may move, in order: i % sink ranks with i % source ranks, for any i."""
    divisor = math.gcd(source.num_ranks, sink.num_ranks)
    for sink_rank in range(sink.num_ranks):
        for source_rank in range(sink_rank % divisor, source.num_ranks, divisor):
            yield sink_rank, source_rank


def plan_move(
    source: CacheSharding,
    sink: CacheSharding,
    first_block: int,
    sink_ids: Sequence[BlockId],
    source_ids: Sequence[BlockId],
    serving_ranks: Sequence[int] = (),
) -> tuple[MovePart, ...]:
    """Cut the READ of logical blocks `first_block`, `first_block` + 1 ... into its parts, each block in exactly one.

    sink_ids, source_ids: group-wide, one for each block. serving_ranks: what SEAL says, if it does: they must be the ones that serve.
    Raises TransferError when the source's blocks are not where its sharding puts them; AssertionError when the sink's are not.
    """
    parts: dict[tuple[int, int], tuple[list[BlockId], list[BlockId]]] = {}
    for index, (sink_id, source_id) in enumerate(zip(sink_ids, source_ids, strict=True)):
        logical_block = first_block + index
        sink_rank, source_rank = sink.serving_rank(logical_block), source.serving_rank(logical_block)
        assert sink.has(sink_rank, sink_id), f"logical block {logical_block} is in block {sink_id}, which rank {sink_rank} does not have"
        if not source.has(source_rank, source_id) or (serving_ranks and serving_ranks[index] != source_rank):
            said = f", rank {serving_ranks[index]}" if serving_ranks else ""
            raise TransferError(
                f"logical block {logical_block} was sealed in block {source_id}{said}; by the peer's sharding rank {source_rank} serves it",
                expected=source_rank,
            )
        into, out_of = parts.setdefault((sink_rank, source_rank), ([], []))
        into.append(sink.local_id(sink_id))
        out_of.append(source.local_id(source_id))
    return tuple(MovePart(*ranks, tuple(into), tuple(out_of)) for ranks, (into, out_of) in sorted(parts.items()))
