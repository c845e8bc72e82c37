"""A few quarantined blocks are borne for a while, many not at all."""

from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.quarantine import QuarantineWatch

TIMERS = ProtocolTimers(quarantine_max_share=0.02, quarantine_max_s=60.0)


def quarantined(num_blocks: int) -> BlockPool:
    pool = BlockPool(100, 64)
    pool.allocate(num_blocks, Holder(HolderKind.QUARANTINE, "p0@1"))
    return pool


def test_no_quarantine_is_never_too_much() -> None:
    watch = QuarantineWatch(quarantined(0), TIMERS)
    assert not any(watch.is_over(now_s) for now_s in (0.0, 100.0, 1000.0))


def test_a_small_share_is_borne_for_its_time() -> None:
    watch = QuarantineWatch(quarantined(2), TIMERS)
    assert [watch.is_over(now_s) for now_s in (1000.0, 1060.0, 1060.1)] == [False, False, True]


def test_a_larger_share_is_too_much_at_once() -> None:
    assert QuarantineWatch(quarantined(3), TIMERS).is_over(0.0)
