"""The view of the workers: whose word counts, and what is booked."""

from kv_transfer.identity import Incarnation, WorkerId
from kv_transfer.messages import PairState, Ping, WorkerAddress, WorkerEntry, WorkerLoad, WorkerState
from router.policy import Placement, WorkerRef
from router.registry import Registry

PREFILL, DECODE = WorkerRef(WorkerId("p"), Incarnation(1)), WorkerRef(WorkerId("d"), Incarnation(2))
UP = (PairState(PREFILL.worker_id, PREFILL.incarnation, True),)


def entry(ref: WorkerRef, state: WorkerState = WorkerState.SERVING, pairs: tuple[PairState, ...] = UP, limit: int = 0) -> WorkerEntry:
    role = "prefill" if ref.worker_id == "p" else "decode"
    return WorkerEntry(WorkerAddress(*ref, "host", 1), role, state, "f", 9, WorkerLoad(blocks_free=3, blocks_cached=2), pairs, limit)


def make(*, linked: bool = True) -> Registry:
    registry = Registry(block_size_tokens=64)
    assert registry.apply_table([entry(PREFILL), entry(DECODE)]) == []
    for ref in (PREFILL, DECODE):
        registry.set_linked(ref, is_linked=linked)
    return registry


def none(_ref: WorkerRef) -> int:
    return 0


def test_a_pair_is_usable_when_both_serve_and_are_linked_and_the_pair_is_up() -> None:
    assert make().has_usable_pair()
    assert not make(linked=False).has_usable_pair()
    registry = make()
    registry.apply_ping(DECODE, Ping(None, (PairState(PREFILL.worker_id, PREFILL.incarnation, False),), WorkerState.SERVING))
    assert not registry.has_usable_pair()
    registry = make()
    registry.apply_ping(PREFILL, Ping(None, (), WorkerState.DRAINING))
    assert not registry.has_usable_pair()
    assert not registry.prefill_candidates(none)


def test_a_new_start_replaces_the_old_one() -> None:
    registry = make()
    again = WorkerRef(PREFILL.worker_id, Incarnation(7))
    assert registry.apply_table([entry(again), entry(DECODE)]) == [PREFILL]
    assert registry.find(PREFILL) is None
    assert registry.find(again) is not None
    assert not registry.has_usable_pair(), "nobody is linked to the new start, and no pair with it is up"
    assert set(registry.apply_table([entry(again, WorkerState.GONE)])) == {again, DECODE}
    registry.apply_ping(DECODE, Ping())
    registry.set_linked(DECODE, is_linked=True)
    assert registry.views() == []


def test_load_is_the_larger_of_report_and_booking() -> None:
    registry = make()
    placement = Placement(decode=DECODE, prefill=PREFILL, prefill_tokens=500, decode_tokens=700)
    registry.book(placement)
    (prefill,), (decode,) = registry.prefill_candidates(none), registry.decode_candidates(none, 0.0)
    assert (prefill.queued_tokens, decode.held_tokens, decode.num_requests, decode.available_tokens) == (500, 700, 1, 320)
    registry.apply_ping(PREFILL, Ping(WorkerLoad(queued_prefill_tokens=900)))
    assert registry.prefill_candidates(none)[0].queued_tokens == 900
    registry.release_prefill(placement)
    registry.release_decode(placement)
    views = registry.views()
    assert all(view.booked_prefill_tokens == view.booked_decode_tokens == view.booked_requests == 0 for view in views)


def test_a_busy_worker_is_offered_one_request_at_a_time() -> None:
    registry = make()
    placement = Placement(decode=DECODE, prefill=None, prefill_tokens=0, decode_tokens=1)
    registry.mark_busy(DECODE, 5.0)
    assert not registry.has_open_decode(4.9)
    assert registry.has_open_decode(5.0)
    registry.book(placement)
    assert not registry.has_open_decode(5.0)
    registry.mark_ready(DECODE)
    assert registry.has_open_decode(5.0)
    registry.book(placement)
    assert not registry.has_open_decode(5.0), "it has room, but nobody knows how much"
    registry.release_decode(placement)
    registry.forget_busy(5.0)
    registry.book(placement)
    assert registry.has_open_decode(5.0)


def test_a_worker_that_somebody_left_is_asked_again_at_once() -> None:
    registry = make()
    registry.mark_busy(DECODE, 50.0)
    registry.mark_relieved(DECODE, 2.0)
    assert registry.has_open_decode(2.0)


def test_the_shortest_announced_context_counts() -> None:
    registry = Registry(block_size_tokens=64)
    assert registry.max_model_len_tokens() == 0
    registry.apply_table([entry(PREFILL, limit=4096), entry(DECODE, limit=2048)])
    assert registry.max_model_len_tokens() == 2048
