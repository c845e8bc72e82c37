"""A pool is recounted once per rest, and a disagreement ends the worker."""

import pytest

from glm_runtime.engine.rest_audit import REST_S, RestAudit
from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.handoff import BlockState

HELD = Holder(HolderKind.REQUEST, "somebody")


def test_a_pool_is_recounted_after_a_rest_and_again_after_the_next_one() -> None:
    pool = BlockPool(4, 64)
    audit = RestAudit(pool)
    audit.look(0, 10.0)
    assert not audit.is_audited
    audit.look(0, 10.0 + REST_S)
    assert audit.is_audited
    blocks = pool.allocate(1, HELD)
    audit.look(0, 12.0)
    assert not audit.is_audited, "a block is held"
    pool.release(blocks, HELD)
    audit.look(1, 13.0)
    assert not audit.is_audited, "a hand-off lives"
    audit.look(0, 14.0)
    audit.look(0, 14.0 + REST_S)
    assert audit.is_audited


def test_a_count_that_disagrees_is_a_bug() -> None:
    pool = BlockPool(4, 64)
    pool._states[0] = BlockState.ALLOCATED  # the bug: a free block that was never given back
    audit = RestAudit(pool)
    audit.look(0, 0.0)
    with pytest.raises(AssertionError, match="a state disagrees"):
        audit.look(0, REST_S)
