"""Which block is in use, by whom and why; which cached block holds which tokens.

Knows: generations, holders, block states, the prefix index and eviction. Does not know where bytes lie (`pool_memory.py`) or
why a holder comes and goes (`source_handoff.py`, `sink_handoff.py`, the schedulers). A block is free only when its holder set is
empty; holding and releasing twice is harmless. The lowest free block is handed out first: neighbours make one large copy.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple

from kv_transfer.errors import PoolExhausted
from kv_transfer.handoff import BLOCK_TRANSITIONS, BlockEvent, BlockState, advance
from kv_transfer.identity import BlockId, Generation


@unique
class HolderKind(Enum):
    """Why a block may not be handed out (PROTOCOL: Ownership)."""

    COMPUTE = "compute"
    SEALED = "sealed"
    CACHE = "cache"
    REQUEST = "request"
    HANDLE = "handle"
    STEP = "step"
    QUARANTINE = "quarantine"

    __hash__ = object.__hash__
    """Members are single, and an enum's own hash is a call of Python for every set that a holder is put into."""


class Holder(NamedTuple):
    """One reason, by name. owner: the transfer (COMPUTE, SEALED, REQUEST), READ (HANDLE), step number (STEP) or peer (QUARANTINE)."""

    kind: HolderKind
    owner: Hashable


CACHE = Holder(HolderKind.CACHE, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAudit:
    """Where all blocks are; num_free + num_cached + num_held + num_quarantined = num_blocks."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_quarantined: int
    holders: dict[str, int]

    @property
    def is_quiesced(self) -> bool:
        """Whether nobody but the cache and the quarantine holds a block (I6)."""
        return self.num_held == 0


class BlockPool:
    """Bookkeeping of `num_blocks` blocks of one rank. Not thread-safe: one loop owns it.

    num_promised: blocks that somebody was promised and has not been handed yet. allocate does not heed it: who allocates without
    a promise asks for `num_unpromised` first.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._free: list[BlockId] = [BlockId(index) for index in range(num_blocks)]
        self._generations: list[Generation] = [Generation(0)] * num_blocks
        self._states: list[BlockState] = [BlockState.FREE] * num_blocks
        self._holders: list[set[Holder]] = [set() for _ in range(num_blocks)]
        self._held_by: dict[Holder, set[BlockId]] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._block_of: dict[bytes, BlockId] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._quarantined: set[BlockId] = set()
        self.num_promised = 0

    # -- handing out and holding ---------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, holder: Holder) -> list[BlockId]:
        """Hand out blocks under `holder`, evicting the least recently used cached ones when no block is free.

        A block's generation moves before it is handed out. Raises PoolExhausted, changing nothing, when too few are available.
        """
        if num_blocks > self.num_available:
            raise PoolExhausted(
                f"{num_blocks} blocks are needed and {self.num_available} of {self.num_blocks} are available",
                needed=num_blocks,
                available=self.num_available,
            )
        while len(self._free) < num_blocks:
            self._evict_one()
        return [self._hand_out(holder) for _ in range(num_blocks)]

    def _hand_out(self, holder: Holder) -> BlockId:
        block_id = heapq.heappop(self._free)
        assert not self._holders[block_id], f"block {block_id} is handed out under {self._holders[block_id]}"
        self._generations[block_id] = Generation(self._generations[block_id] + 1)
        self._states[block_id] = advance(BLOCK_TRANSITIONS, self._states[block_id], BlockEvent.HANDED_OUT)
        self._add(block_id, holder)
        return block_id

    def _evict_one(self) -> None:
        block_id, _ = self._evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        self._remove(block_id, CACHE)

    def promise(self, num_blocks: int) -> None:
        """Promise blocks that are to be handed out later; also a negative number, once they are or when nobody wants them any more.

        Raises PoolExhausted, changing nothing, when too few are promised to nobody.
        """
        if num_blocks > 0 and num_blocks > self.num_unpromised:
            raise PoolExhausted(
                f"{num_blocks} blocks are needed and {self.num_unpromised} are neither used nor promised", needed=num_blocks
            )
        self.num_promised += num_blocks
        assert self.num_promised >= 0, "more promises are kept than were given"

    def hold(self, block_ids: Iterable[BlockId], holder: Holder) -> None:
        """Add `holder` to blocks that somebody holds already. Idempotent."""
        assert holder.kind is not HolderKind.CACHE, "the cache holds what is published, nothing else"
        for block_id in block_ids:
            assert self._holders[block_id], f"block {block_id} is free: it must be allocated or pinned, not held"
            self._add(block_id, holder)

    def release(self, block_ids: Iterable[BlockId], holder: Holder) -> None:
        """Take `holder` off these blocks; those without a holder become free. Idempotent.

        Blocks given later in `block_ids` are evicted earlier: the tail of a prompt before its head.
        """
        assert holder.kind is not HolderKind.CACHE, "a cached block leaves the cache by eviction"
        for block_id in reversed(list(block_ids)):
            if holder in self._holders[block_id]:
                self._remove(block_id, holder)

    def release_all(self, holder: Holder) -> None:
        """Take `holder` off every block that it holds. Idempotent."""
        self.release(self.held_by(holder), holder)

    def _add(self, block_id: BlockId, holder: Holder) -> None:
        self._holders[block_id].add(holder)
        held = self._held_by.get(holder)
        if held is None:
            held = self._held_by[holder] = set()
        held.add(block_id)
        kind = holder.kind
        if kind is HolderKind.QUARANTINE:
            self._quarantined.add(block_id)
        if kind is not HolderKind.CACHE:
            self._evictable.pop(block_id, None)

    def _remove(self, block_id: BlockId, holder: Holder) -> None:
        holders = self._holders[block_id]
        holders.remove(holder)
        held = self._held_by[holder]
        held.remove(block_id)
        if not held:
            del self._held_by[holder]
        if holder.kind is HolderKind.QUARANTINE:
            self._quarantined.discard(block_id)
        if not holders:
            self.advance([block_id], BlockEvent.RELEASED)
            heapq.heappush(self._free, block_id)
        elif holders == {CACHE}:
            self._evictable[block_id] = None

    # -- states --------------------------------------------------------------------------------------------------------

    def advance(self, block_ids: Iterable[BlockId], event: BlockEvent) -> None:
        """Move each block along BLOCK_TRANSITIONS. Raises IllegalTransition."""
        states = self._states
        for block_id in block_ids:
            states[block_id] = advance(BLOCK_TRANSITIONS, states[block_id], event)

    def state(self, block_id: BlockId) -> BlockState:
        """Where the block is in its life."""
        return self._states[block_id]

    def generation(self, block_id: BlockId) -> Generation:
        """Number of times the block has been handed out."""
        return self._generations[block_id]

    def holders(self, block_id: BlockId) -> frozenset[Holder]:
        """Who holds the block now."""
        return frozenset(self._holders[block_id])

    def is_evictable(self, block_id: BlockId) -> bool:
        """Whether only the cache holds the block."""
        return block_id in self._evictable

    def held_by(self, holder: Holder) -> tuple[BlockId, ...]:
        """The blocks under `holder`, lowest first."""
        return tuple(sorted(self._held_by.get(holder, ())))

    # -- prefix index --------------------------------------------------------------------------------------------------

    def publish(self, block_id: BlockId, key: bytes) -> bool:
        """Enter a whole block into the prefix index, under the cache holder. Returns whether this block is the one indexed.

        The first publisher of a key wins. The caller must hold the block, and it must be committed, or computed here just now.
        """
        assert self._holders[block_id], f"block {block_id} is published without a holder"
        state = self._states[block_id]
        if state is BlockState.ALLOCATED:
            state = self._states[block_id] = advance(BLOCK_TRANSITIONS, state, BlockEvent.COMPUTED)
        assert state is BlockState.COMMITTED, f"block {block_id} is {state.value}, not committed"
        known = self._key_of.get(block_id)
        assert known is None or known == key, f"block {block_id} is already published under another key"
        if self._block_of.setdefault(key, block_id) != block_id:
            return False
        self._key_of[block_id] = key
        self._add(block_id, CACHE)
        return True

    def lookup(self, keys: Sequence[bytes]) -> list[BlockId]:
        """The cached blocks of the longest prefix of `keys`. Changes nothing; the blocks may be evicted by the next allocate."""
        found = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def pin(self, keys: Sequence[bytes], holder: Holder) -> list[BlockId]:
        """The cached blocks of the longest prefix of `keys`, now under `holder`, which keeps them from eviction."""
        found = self.lookup(keys)
        self.hold(found, holder)
        return found

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the cache holds: evictable."""
        return len(self._evictable)

    @property
    def num_quarantined(self) -> int:
        """Blocks that an ended READ may still write."""
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        """Blocks in use: not free, not evictable, not quarantined."""
        return self.num_blocks - self.num_free - self.num_cached - self.num_quarantined

    @property
    def num_available(self) -> int:
        """Blocks that allocate could hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_unpromised(self) -> int:
        """Blocks that could be handed out now and are promised to nobody."""
        return self.num_available - self.num_promised

    def audit(self) -> PoolAudit:
        """Recount everything from the holder sets. Raises AssertionError when a count, state or index entry disagrees."""
        free = {BlockId(index) for index, holders in enumerate(self._holders) if not holders}
        cached = {BlockId(index) for index, holders in enumerate(self._holders) if holders == {CACHE}}
        assert sorted(free) == sorted(self._free), f"free list {sorted(self._free)} but without holder {sorted(free)}"
        assert cached == set(self._evictable), f"evictable {sorted(self._evictable)} but held by the cache only {sorted(cached)}"
        assert all((state is BlockState.FREE) == (index in free) for index, state in enumerate(self._states)), "a state disagrees"
        assert self._block_of == {key: block_id for block_id, key in self._key_of.items()}, "the prefix index and its inverse disagree"
        assert set(self._key_of) == self._held_by.get(CACHE, set()), "published blocks and the cache holder disagree"
        assert all(self._states[block_id] is BlockState.COMMITTED for block_id in self._key_of), "an unfinished block is indexed"
        counted = {(holder, block_id) for block_id, holders in enumerate(self._holders) for holder in holders}
        assert counted == {(holder, block_id) for holder, ids in self._held_by.items() for block_id in ids}, (
            "holders and their inverse disagree"
        )
        per_kind = {kind.value: sum(holder.kind is kind for holder, _ in counted) for kind in HolderKind}
        return PoolAudit(
            num_blocks=self.num_blocks,
            num_free=self.num_free,
            num_cached=self.num_cached,
            num_held=self.num_held,
            num_quarantined=self.num_quarantined,
            holders=per_kind,
        )
