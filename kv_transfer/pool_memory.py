"""The bytes of one pool: mapped once, on huge pages where the kernel gives them, and never unmapped before the process exits.

Knows: where a block's bytes lie. Does not know which blocks are in use (`block_pool.py`) or what is in them (`layout.py`).
Unmapping a pool under a peer that still READs it crashes a process on some transports; hence the life-long mapping.
"""

import ctypes
import hashlib
import mmap

from kv_transfer.identity import BlockId, Incarnation

HUGE_PAGE_BYTES = 2 * 1024 * 1024
NUM_PROBE_BLOCKS = 2


def probe_pattern(incarnation: Incarnation, num_bytes: int) -> bytes:
    """What the probe block of a process holds: a reader that finds it reached the right start of the right process."""
    tile = hashlib.sha256(b"glm-cluster probe" + incarnation.to_bytes(8, "little")).digest()
    return (tile * (num_bytes // len(tile) + 1))[:num_bytes]


class PoolMemory:
    """`num_blocks` blocks of `block_bytes`, then the probe block and the block that probes of others land in.

    `buffer` is a writable view of all of it. The mapping is anonymous, zero, 2 MiB aligned, and outlives this object.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks <= 0 or block_bytes <= 0:
            raise ValueError(f"a pool needs blocks: got num_blocks={num_blocks}, block_bytes={block_bytes}")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        num_bytes = (num_blocks + NUM_PROBE_BLOCKS) * block_bytes
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        offset = -start % HUGE_PAGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes)
        # One reference that nobody gives back: the mapping must not go away with the last Python object that names it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
        self.base_address = start + offset
        self.buffer = memoryview(mapping)[offset : offset + num_bytes]

    @property
    def probe_block(self) -> BlockId:
        """The block that holds this process's pattern, for peers to READ."""
        return BlockId(self.num_blocks)

    @property
    def landing_block(self) -> BlockId:
        """The block that this process READs a peer's probe block into."""
        return BlockId(self.num_blocks + 1)

    def block(self, block_id: BlockId) -> memoryview:
        """A writable view of one block's bytes, probe blocks included."""
        if not 0 <= block_id < self.num_blocks + NUM_PROBE_BLOCKS:
            raise ValueError(f"block {block_id} is not in a pool of {self.num_blocks} blocks and {NUM_PROBE_BLOCKS} probe blocks")
        return self.buffer[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def write_probe(self, incarnation: Incarnation) -> None:
        """Fill the probe block with the pattern of this process start."""
        self.block(self.probe_block)[:] = probe_pattern(incarnation, self.block_bytes)
