"""The block pool against a naive model: sets of holders and a dictionary of keys, nothing clever."""

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kv_transfer.block_pool import CACHE, BlockPool, Holder, HolderKind
from kv_transfer.errors import PoolExhausted
from kv_transfer.identity import BlockId

HOLDERS = [Holder(kind, owner) for kind in (HolderKind.REQUEST, HolderKind.STEP, HolderKind.SEALED) for owner in (1, 2)]
KEYS = [bytes([index]) * 16 for index in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Every operation, checked after each against the model."""

    num_homes = 1

    @initialize(num_local=st.integers(1, 6))
    def begin(self, num_local: int) -> None:
        num_blocks = max(num_local // self.num_homes, 1) * self.num_homes
        self.pool = BlockPool(num_blocks, 64, self.num_homes)
        self.promised = [0] * self.num_homes
        self.holders: list[set[Holder]] = [set() for _ in range(num_blocks)]
        self.generations = [0] * num_blocks
        self.key_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4), holder=st.sampled_from(HOLDERS), first_block=st.integers(0, 9))
    def allocate(self, count: int, holder: Holder, first_block: int) -> None:
        could = [block for block, holders in enumerate(self.holders) if holders <= {CACHE}]
        homes = [place % self.num_homes for place in range(first_block, first_block + count)]
        try:
            ids = self.pool.allocate(count, holder, first_block)
        except PoolExhausted:
            assert any(homes.count(home) > len(self.of_home(could, home)) for home in homes)
            return
        assert [block % self.num_homes for block in ids] == homes, "a block has the home of its place in the sequence"
        assert len(set(ids)) == count
        assert set(ids) <= set(could), "a block in use was handed out"
        free = [block for block in could if not self.holders[block]]
        for home in range(self.num_homes):
            taken, had = self.of_home(ids, home), self.of_home(free, home)
            assert len(set(taken) & set(had)) == min(len(taken), len(had)), "the cache is evicted only when nothing is free"
        for block in ids:
            self.key_of.pop(block, None)
            self.holders[block] = {holder}
            self.generations[block] += 1

    def of_home(self, blocks: Iterable[int], home: int) -> list[int]:
        return [block for block in blocks if block % self.num_homes == home]

    @rule(count=st.integers(1, 4), first_block=st.integers(0, 9), takes_back=st.booleans())
    def promise(self, count: int, first_block: int, takes_back: bool) -> None:
        could = [block for block, holders in enumerate(self.holders) if holders <= {CACHE}]
        places = [place % self.num_homes for place in range(first_block, first_block + count)]
        before = list(self.promised)
        try:
            self.pool.promise(count, first_block)
        except PoolExhausted:
            assert any(places.count(home) + known > len(self.of_home(could, home)) for home, known in enumerate(before))
            return
        assert all(places.count(home) + known <= len(self.of_home(could, home)) for home, known in enumerate(before))
        if takes_back:
            self.pool.promise(-count, first_block)
        else:
            self.promised = [known + places.count(home) for home, known in enumerate(before)]

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def hold(self, data: st.DataObject, holder: Holder) -> None:
        block = data.draw(st.sampled_from([block for block, holders in enumerate(self.holders) if holders]))
        self.pool.hold([BlockId(block)], holder)
        self.holders[block].add(holder)

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS), everything=st.booleans())
    def release(self, data: st.DataObject, holder: Holder, everything: bool) -> None:
        blocks = set(range(len(self.holders))) if everything else data.draw(st.sets(st.integers(0, len(self.holders) - 1)))
        if everything:
            self.pool.release_all(holder)
        else:
            self.pool.release([BlockId(block) for block in blocks], holder)
        for block in blocks:
            self.holders[block].discard(holder)

    @precondition(lambda self: any(holders - {CACHE} for holders in self.holders))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = [block for block, holders in enumerate(self.holders) if holders - {CACHE} and self.key_of.get(block, key) == key]
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        is_first = key not in self.key_of.values() or self.key_of.get(block) == key
        assert self.pool.publish(BlockId(block), key) is is_first
        if is_first:
            self.key_of[block] = key
            self.holders[block].add(CACHE)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), holder=st.sampled_from(HOLDERS))
    def pin(self, keys: list[bytes], holder: Holder) -> None:
        block_of = {key: block for block, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in block_of:
                break
            expected.append(block_of[key])
        assert self.pool.lookup(keys) == expected
        if any(block % self.num_homes != place % self.num_homes for place, block in enumerate(expected)):
            with pytest.raises(AssertionError, match="other homes"):
                self.pool.pin(keys, holder)
            return
        assert self.pool.pin(keys, holder) == expected
        for block in expected:
            self.holders[block].add(holder)

    @invariant()
    def the_pool_is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        audit = self.pool.audit()
        assert audit.num_free == sum(not holders for holders in self.holders)
        assert audit.num_cached == sum(holders == {CACHE} for holders in self.holders)
        assert audit.num_free + audit.num_cached + audit.num_held + audit.num_quarantined == len(self.holders)
        could = [block for block, holders in enumerate(self.holders) if holders <= {CACHE}]
        fullest = min(len(self.of_home(could, home)) for home in range(self.num_homes))
        assert self.pool.num_available == fullest * self.num_homes, "availability is counted on the fullest home"
        assert self.pool.num_promised == sum(self.promised)
        for block, holders in enumerate(self.holders):
            assert self.pool.holders(BlockId(block)) == holders
            assert self.pool.generation(BlockId(block)) == self.generations[block]


@pytest.mark.parametrize("num_homes", [1, 2, 4])
def test_the_pool_does_what_a_naive_one_does(num_homes: int) -> None:
    machine = type(f"PoolOf{num_homes}Homes", (PoolMachine,), {"num_homes": num_homes})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=50, derandomize=True, deadline=None))
