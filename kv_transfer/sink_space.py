"""The blocks of one sink transfer: the pinned prefix, the credit that was promised, and the table that grows out of it.

Knows: that nobody may take what was promised to another. Does not know what is in the blocks or how it gets there.
"""

import itertools

from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.errors import PoolExhausted
from kv_transfer.identity import BlockId, TransferId


class SinkSpace:
    """Block table and credit of `transfer`, under its request holder. The credit is a promise of the pool, for the places of the table
    behind the pinned prefix that are not filled yet.
    """

    def __init__(self, transfer: TransferId) -> None:
        self.have_blocks = 0
        self.credit_blocks = 0
        self.granted_blocks = 0
        self._credit_end = 0
        self._blocks: dict[int, BlockId] = {}
        self._holder = Holder(HolderKind.REQUEST, transfer)

    @property
    def table(self) -> tuple[BlockId, ...]:
        """The blocks in order, up to the first that is not allocated."""
        table: list[BlockId] = []
        while len(table) in self._blocks:
            table.append(self._blocks[len(table)])
        return tuple(table)

    def open(self, pool: BlockPool, keys: list[bytes], num_missing: int) -> None:
        """Pin what `keys` find and promise this transfer the rest of `num_missing` blocks.

        num_missing: blocks wanted in all, pinned ones included. Raises PoolExhausted, holding nothing.
        """
        pinned = pool.pin(keys, self._holder)
        credit = num_missing - len(pinned)
        try:
            pool.promise(credit, len(pinned))
        except PoolExhausted:
            pool.release(pinned, self._holder)
            raise
        self._blocks = dict(enumerate(pinned))
        self.have_blocks = len(pinned)
        self.credit_blocks = self.granted_blocks = credit
        self._credit_end = num_missing

    def allocate(self, pool: BlockPool, places: range) -> tuple[BlockId, ...]:
        """Blocks for these places of the table, out of the credit as far as it goes; the caller has checked that there are enough."""
        assert self._blocks.keys().isdisjoint(places), "a place of the table is filled once"
        ids = pool.allocate(len(places), self._holder, places.start)
        self._blocks.update(zip(places, ids, strict=True))
        if self.credit_blocks:
            self._take_from_credit(pool, places)
        return tuple(ids)

    def grow(self, pool: BlockPool, num_blocks: int) -> tuple[BlockId, ...]:
        """Append blocks; those. Raises PoolExhausted when what goes beyond the credit is promised to others."""
        first = len(self._blocks)
        beyond = max(num_blocks - self.credit_blocks, 0)
        if beyond and not pool.can_promise(beyond, first + num_blocks - beyond):
            text = f"{beyond} blocks beyond the credit are needed and {pool.num_unpromised} are not promised"
            raise PoolExhausted(text, needed=num_blocks)
        return self.allocate(pool, range(first, first + num_blocks))

    def let_go(self, pool: BlockPool) -> None:
        """Give back the blocks and the promise. Idempotent."""
        table = self.table
        pool.release(table, self._holder)
        pool.release_all(self._holder)
        unfilled = [place for place in range(self.have_blocks, self._credit_end) if place not in self._blocks]
        self._blocks = {}
        order = itertools.count()
        for _, run in itertools.groupby(unfilled, key=lambda place: place - next(order)):
            places = list(run)  # neighbours: nearly always all of them
            self._take_from_credit(pool, range(places[0], places[-1] + 1))
        assert self.credit_blocks == 0, "the credit is for the places that are not filled"
        self._credit_end = 0

    def _take_from_credit(self, pool: BlockPool, places: range) -> None:
        """What is filled, or never will be, is not promised any more; places from `_credit_end` on never were."""
        taken = max(min(places.stop, self._credit_end) - places.start, 0)
        self.credit_blocks -= taken
        pool.promise(-taken, places.start)
