"""Placement: decode first, then prefill; one cost; ties always go the same way."""

from dataclasses import replace

from kv_transfer.identity import Incarnation, WorkerId
from router.policy import DecodeCandidate, Demand, Placement, PrefillCandidate, WorkerRef, choose_pair


def ref(name: str, incarnation: int = 1) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(incarnation))


P0, P1 = PrefillCandidate(ref=ref("p0"), queued_tokens=0), PrefillCandidate(ref=ref("p1"), queued_tokens=0)
BOTH = frozenset({P0.ref, P1.ref})
D0 = DecodeCandidate(ref=ref("d0"), held_tokens=0, num_requests=0, available_tokens=10_000, pairs=BOTH)
D1 = replace(D0, ref=ref("d1"))
DEMAND = Demand(num_tokens=1000, num_more_tokens=100)


def choose(demand: Demand, prefills: list[PrefillCandidate], decodes: list[DecodeCandidate], bypass_below: int = 0) -> Placement | None:
    return choose_pair(demand, prefills, decodes, decode_row_tokens=256, local_prefill_below_tokens=bypass_below)


def names(placement: Placement | None) -> tuple[str, str | None]:
    assert placement is not None
    return placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else None


def test_ties_go_to_the_smaller_id_in_any_order() -> None:
    assert names(choose(DEMAND, [P0, P1], [D0, D1])) == names(choose(DEMAND, [P1, P0], [D1, D0])) == ("d0", "p0")


def test_the_less_loaded_workers_are_taken() -> None:
    busy_d0, busy_p0 = replace(D0, num_requests=3), replace(P0, queued_tokens=5000)
    assert names(choose(DEMAND, [busy_p0, P1], [busy_d0, D1])) == ("d1", "p1")


def test_a_cached_prefix_is_worth_its_tokens_and_no_more() -> None:
    warm = replace(P1, overlap_tokens=800)
    assert names(choose(DEMAND, [P0, warm], [D0]))[1] == "p1"
    assert names(choose(DEMAND, [P0, replace(warm, queued_tokens=799)], [D0]))[1] == "p1"
    assert names(choose(DEMAND, [P0, replace(warm, queued_tokens=801)], [D0]))[1] == "p0"


def test_what_is_booked_is_what_must_be_computed() -> None:
    placement = choose(DEMAND, [replace(P0, overlap_tokens=960)], [D0])
    assert placement is not None
    assert (placement.prefill_tokens, placement.decode_tokens) == (40, 1256)


def test_a_decode_worker_without_room_is_the_last_choice() -> None:
    assert names(choose(DEMAND, [P0], [replace(D0, available_tokens=0), replace(D1, held_tokens=900)]))[0] == "d1"


def test_only_pairs_that_are_up_are_used() -> None:
    only_p1 = replace(D0, pairs=frozenset({P1.ref}))
    assert names(choose(DEMAND, [replace(P1, queued_tokens=9999), P0], [only_p1])) == ("d0", "p1")
    assert choose(DEMAND, [P0], [only_p1]) is None
    assert choose(DEMAND, [P0], [replace(D0, pairs=frozenset({ref("p0", 2)}))]) is None, "another start of the worker is another worker"
    assert choose(DEMAND, [], [D0]) is None
    assert choose(DEMAND, [P0], []) is None


def test_a_worker_that_failed_the_request_is_taken_only_without_another_choice() -> None:
    avoid = replace(DEMAND, avoid={D0.ref, P0.ref})
    assert names(choose(avoid, [P0, replace(P1, queued_tokens=5000)], [D0, replace(D1, num_requests=9)])) == ("d1", "p1")
    assert names(choose(avoid, [P0], [D0])) == ("d0", "p0")


def test_short_remainders_bypass_prefill_when_configured() -> None:
    warm = replace(D1, overlap_tokens=900)
    assert names(choose(DEMAND, [P0], [D0, warm], bypass_below=101)) == ("d1", None)
    assert names(choose(DEMAND, [], [warm], bypass_below=101)) == ("d1", None)
    assert names(choose(DEMAND, [P0], [D0, warm], bypass_below=100)) == ("d0", "p0"), "what decode has counts only for a bypass"
    assert names(choose(Demand(num_tokens=1, num_more_tokens=1), [P0], [D0], bypass_below=0))[1] == "p0", "0 is never"
