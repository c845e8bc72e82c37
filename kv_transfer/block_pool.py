"""Which block is in use, by whom and why; which cached block holds which tokens.

Knows: generations, holders, block states, the prefix index and eviction. Does not know where bytes lie (`pool_memory.py`) or
why a holder comes and goes (`source_handoff.py`, `sink_handoff.py`, the schedulers). A block is free only when its holder set is
empty; holding and releasing twice is harmless. The lowest free block is handed out first: neighbours make one large copy.

Where a worker's ranks share a sequence's cache, ids are group-wide (`geometry.CacheSharding`): each has a home, `id % num_homes`, and
logical block i of a sequence is handed out from home `i % num_homes`. Generations, holders and the prefix index are the group's.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from operator import add, gt, sub
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
EXCHANGE = Holder(HolderKind.STEP, "exchange")
"""Of blocks that the ranks which did not read them are still to copy, or are copying in the step in flight."""


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
    """Bookkeeping of the `num_blocks` blocks of one worker, all homes together. Not thread-safe: one loop owns it.

    Blocks that somebody was promised have not been handed out yet. allocate does not heed them: who allocates without a promise asks
    for `num_unpromised` first.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, num_homes: int = 1) -> None:
        assert num_blocks % num_homes == 0, f"{num_blocks} blocks do not lie evenly on {num_homes} homes"
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.num_homes = num_homes
        self._free: list[list[BlockId]] = [[BlockId(index) for index in range(home, num_blocks, num_homes)] for home in range(num_homes)]
        self._generations: list[Generation] = [Generation(0)] * num_blocks
        self._states: list[BlockState] = [BlockState.FREE] * num_blocks
        self._holders: list[set[Holder]] = [set() for _ in range(num_blocks)]
        self._held_by: dict[Holder, set[BlockId]] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._block_of: dict[bytes, BlockId] = {}
        self._evictable: list[OrderedDict[BlockId, None]] = [OrderedDict() for _ in range(num_homes)]
        self._quarantined: set[BlockId] = set()
        self._promised = [0] * num_homes

    # -- handing out and holding ---------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, holder: Holder, first_block: int = 0) -> list[BlockId]:
        """Hand out logical blocks `first_block` and so on of a sequence under `holder`, each from its home, in order.

        Evicts the least recently used cached block of a home where none is free. A block's generation moves before it is handed out.
        Raises PoolExhausted, changing nothing, when too few are available.
        """
        needed = self.by_home(num_blocks, first_block)
        if any(map(gt, needed, self.available_by_home())):
            raise PoolExhausted(
                f"{num_blocks} blocks are needed and {self.num_available} of {self.num_blocks} are available",
                needed=num_blocks,
                available=self.num_available,
            )
        for free, evictable, count in zip(self._free, self._evictable, needed, strict=True):
            while len(free) < count:
                self._evict_one(evictable)
        homes, free_of = self.num_homes, self._free
        return [self._hand_out(holder, free_of[index % homes]) for index in range(first_block, first_block + num_blocks)]

    def _hand_out(self, holder: Holder, free: list[BlockId]) -> BlockId:
        block_id = heapq.heappop(free)
        assert not self._holders[block_id], f"block {block_id} is handed out under {self._holders[block_id]}"
        self._generations[block_id] = Generation(self._generations[block_id] + 1)
        self._states[block_id] = advance(BLOCK_TRANSITIONS, self._states[block_id], BlockEvent.HANDED_OUT)
        self._add(block_id, holder)
        return block_id

    def _evict_one(self, evictable: OrderedDict[BlockId, None]) -> None:
        block_id, _ = evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        self._remove(block_id, CACHE)

    def promise(self, num_blocks: int, first_block: int = 0) -> None:
        """Promise logical blocks `first_block` and so on, to be handed out later.

        A negative number takes as many back, from `first_block` on, once they are handed out or when nobody wants them any more.
        Raises PoolExhausted, changing nothing, when too few of a home are promised to nobody.
        """
        if num_blocks > 0 and not self.can_promise(num_blocks, first_block):
            raise PoolExhausted(
                f"{num_blocks} blocks are needed and {self.num_unpromised} are neither used nor promised", needed=num_blocks
            )
        sign = 1 if num_blocks >= 0 else -1
        for home, count in enumerate(self.by_home(abs(num_blocks), first_block)):
            self._promised[home] += sign * count
        assert min(self._promised) >= 0, "more promises are kept than were given"

    def can_promise(self, num_blocks: int, first_block: int = 0) -> bool:
        """Whether logical blocks `first_block` and so on could be handed out now without taking what is promised to somebody.

        Not while a home has less than is promised of it, even if none of these is at home there: who has just pinned a block asks, too.
        """
        return not any(map(gt, self.by_home(num_blocks, first_block), self.unpromised_by_home()))

    def by_home(self, num_blocks: int, first_block: int = 0) -> tuple[int, ...]:
        """How many of logical blocks `first_block` and so on have each home."""
        homes = self.num_homes
        if homes == 1:
            return (num_blocks,)
        return tuple([(num_blocks + (first_block - home - 1) % homes) // homes for home in range(homes)])

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
            self._evictable[block_id % self.num_homes].pop(block_id, None)

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
            heapq.heappush(self._free[block_id % self.num_homes], block_id)
        elif holders == {CACHE}:
            self._evictable[block_id % self.num_homes][block_id] = None

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
        return block_id in self._evictable[block_id % self.num_homes]

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
        """The cached blocks of the longest prefix of `keys`, now under `holder`, which keeps them from eviction.

        keys: of a sequence, from its first block on. A key is a hash of all that comes before, so the block has the home of its place.
        """
        found = self.lookup(keys)
        assert self.num_homes == 1 or all(block_id % self.num_homes == index % self.num_homes for index, block_id in enumerate(found)), (
            f"blocks {found} are cached on other homes than their places have"
        )
        self.hold(found, holder)
        return found

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return sum(map(len, self._free))

    @property
    def num_cached(self) -> int:
        """Blocks that only the cache holds: evictable."""
        return sum(map(len, self._evictable))

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
        """Consecutive blocks of a sequence that allocate could hand out now, wherever they begin: counted on the fullest home."""
        return self.num_homes * min(self.available_by_home())

    @property
    def num_promised(self) -> int:
        """Blocks that are promised and not handed out."""
        return sum(self._promised)

    @property
    def num_unpromised(self) -> int:
        """As `num_available`, without what is promised to somebody."""
        return self.num_homes * min(self.unpromised_by_home())

    def available_by_home(self) -> tuple[int, ...]:
        """Blocks of each home that are free, or evictable."""
        if self.num_homes == 1:
            return (len(self._free[0]) + len(self._evictable[0]),)
        return tuple(map(add, map(len, self._free), map(len, self._evictable)))

    def unpromised_by_home(self) -> tuple[int, ...]:
        """Of those, how many are promised to nobody."""
        available = self.available_by_home()
        if self.num_homes == 1:
            return (available[0] - self._promised[0],)
        return tuple(map(sub, available, self._promised))

    def audit(self) -> PoolAudit:
        """Recount everything from the holder sets. Raises AssertionError when a count, state or index entry disagrees."""
        free = {BlockId(index) for index, holders in enumerate(self._holders) if not holders}
        cached = {BlockId(index) for index, holders in enumerate(self._holders) if holders == {CACHE}}
        listed = sorted(itertools.chain(*self._free))
        evictable = sorted(itertools.chain(*self._evictable))
        assert sorted(free) == listed, f"free list {listed} but without holder {sorted(free)}"
        assert sorted(cached) == evictable, f"evictable {evictable} but held by the cache only {sorted(cached)}"
        for home, ids in enumerate(zip(self._free, self._evictable, strict=True)):
            assert all(block_id % self.num_homes == home for block_id in itertools.chain(*ids)), f"home {home} lists others' blocks"
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
