"""Where a block's bytes lie, in this process's pool or a peer's, and which rank has a token's cache.

Knows: addresses and byte ranges. One rank per worker for now: every question about ranks answers rank 0, and the callers
already ask. Does not know what is in a region (`layout.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.identity import BlockId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import PeerOffer


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of one layer of one component of one block: `rank` has them at `offset_bytes` of its block `block_id`."""

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
        """The pool that a peer described in PairHello."""
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


def locate(layout: CacheLayout, block_table: Sequence[BlockId], token: int, component: str, layer: int) -> Place:
    """Where the cache of token position `token` is. Raises KeyError when the layout has no such region, IndexError beyond the table."""
    region = layout.region(component, layer)
    return Place(0, block_table[token // layout.block_size_tokens], region.offset_bytes, region.num_bytes)


def serving_rank(logical_block: int) -> int:
    """The rank that serves this logical block of a sequence to a peer."""
    del logical_block
    return 0
