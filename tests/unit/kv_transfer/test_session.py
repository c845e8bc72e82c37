"""Hand-offs end to end on both real sessions: the calm way, then one bent wire or one rule at a time."""

import msgspec
import pytest

from kv_transfer.block_pool import EXCHANGE, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import PoolExhausted
from kv_transfer.geometry import CacheSharding
from kv_transfer.handoff import DestroyAgent, FillLocally, Ready, RecordArrived, SuspectPeer
from kv_transfer.identity import Incarnation, RequestId, TransferId, pack_tokens
from kv_transfer.messages import (
    Ask,
    Cancel,
    Closed,
    Complete,
    Failed,
    FailureKind,
    Gone,
    Keep,
    Progress,
    Resend,
    Seal,
    SealedBlock,
    SinkBusy,
    SinkReady,
    Stale,
    Taken,
    Valid,
    Validate,
)
from kv_transfer.transports.loopback import FaultPlan
from tests.handoff_pair import BLOCK_SIZE, HandoffPair

PROMPT = range(100, 118)  # 18 tokens: four whole blocks and a half


def started(pair: HandoffPair, tokens: object = PROMPT, **arguments: object) -> TransferId:
    transfer = pair.open(tokens, **arguments)  # type: ignore[arg-type]
    assert pair.start(transfer)
    return transfer


def failures(pair: HandoffPair) -> list[str]:
    return [message.code for message in pair.to_router if isinstance(message, Failed)]


def finish(pair: HandoffPair, transfer: TransferId) -> None:
    """Decode to the end; the router has all tokens and says so."""
    pair.do("sink", pair.sink.running(transfer, pair.now_s))
    pair.do("sink", pair.sink.finished(transfer, pair.now_s))
    pair.tell("sink", Cancel(transfer, "done"))
    pair.tell("source", Cancel(transfer, "done"))
    pair.settle()


# -- the calm way ------------------------------------------------------------------------------------------------------


def test_a_prompt_moves_in_chunks_and_nothing_is_left_behind() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    assert pair.router_heard(SinkReady) == [SinkReady(transfer, 0, 6)]
    pair.compute(transfer)
    pair.settle()
    assert transfer in pair.ready
    assert [effect for effect in pair.events if isinstance(effect, RecordArrived)]
    assert pair.dropped["source", transfer].reason == "taken"
    assert len(pair.sink.block_table(transfer)) == 5
    finish(pair, transfer)
    assert pair.dropped["sink", transfer].reason == "done"
    assert Closed(transfer, "done") in pair.to_router
    pair.assert_no_leaks()
    assert pair.sink_pool.num_cached == 4, "whole blocks stay in the cache, the half one does not"


def test_the_first_chunk_is_read_while_the_second_is_computed() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    pair.settle()
    assert pair.sink_pool.num_cached + pair.sink_pool.num_held == 2
    assert not pair.source.is_live(transfer) or transfer not in pair.ready
    pair.compute(transfer)
    pair.settle()
    assert transfer in pair.ready


def test_several_reads_of_one_transfer_are_in_flight_at_once() -> None:
    pair = HandoffPair(chunk_tokens=4)
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    assert len(pair.reads) == 5
    pair.settle()
    assert transfer in pair.ready


def test_a_second_turn_is_sent_only_what_the_sink_has_not() -> None:
    pair = HandoffPair()
    finish_first = started(pair)
    pair.compute(finish_first)
    pair.settle()
    finish(pair, finish_first)
    longer = started(pair, range(100, 126), request="r2")
    assert pair.router_heard(SinkReady)[-1] == SinkReady(longer, 16, 4)
    assert pair.sink.have_tokens(longer) == 16
    pair.compute(longer)
    assert all(message.start >= 16 for _, _, message in pair.wire if isinstance(message, Seal))
    pair.settle()
    assert longer in pair.ready


def test_a_prompt_that_is_all_cached_still_computes_its_last_block() -> None:
    pair = HandoffPair()
    first = started(pair, range(100, 108))
    pair.compute(first)
    pair.settle()
    finish(pair, first)
    again = started(pair, range(100, 108), request="r2")
    assert pair.sink.have_tokens(again) == 4
    pair.compute(again)
    pair.settle()
    assert again in pair.ready


def test_blocks_that_the_source_had_cached_are_sealed_too() -> None:
    pair = HandoffPair()
    first = started(pair)
    pair.compute(first)
    pair.tell("sink", Cancel(first, "abort"))
    pair.settle()
    pair.start_sink_process()
    second = started(pair, request="r2")
    pair.compute(second)
    pair.settle()
    assert second in pair.ready


def test_a_local_fill_needs_no_source() -> None:
    pair = HandoffPair()
    transfer = pair.open(PROMPT, local=True)
    assert pair.events[-1] == FillLocally(transfer, 0)
    assert len(pair.sink.block_table(transfer)) == 5
    pair.do("sink", pair.sink.filled_locally(transfer, 0.0))
    finish(pair, transfer)
    pair.assert_no_leaks()


# -- messages lost, repeated, overtaken --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Seal, Complete, Validate, Valid, Taken, Progress])
def test_a_lost_message_is_noticed_and_said_again(kind: type) -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    lost = 0
    for _ in range(6):
        while pair.wire and not lost:
            lost += pair.drop(kind)
            if pair.wire:
                pair.deliver()
            pair.land_all()
            pair.poll_reads()
        pair.settle()
        pair.wait(1.1)
    pair.settle()
    assert lost, f"no {kind.__name__} was said"
    assert transfer in pair.ready
    assert pair.dropped["source", transfer].reason == "taken"
    assert failures(pair) == []


def test_everything_said_three_times_in_any_order_changes_nothing() -> None:
    pair = HandoffPair(chunk_tokens=4)
    transfer = started(pair)
    pair.compute(transfer)
    for _ in range(100):
        if pair.wire:
            pair.deliver(len(pair.wire) - 1, keep=True)
            pair.deliver(0, keep=True)
            pair.deliver(len(pair.wire) - 1)
        pair.land_all()
        pair.poll_reads()
    pair.settle()
    assert transfer in pair.ready
    finish(pair, transfer)
    pair.assert_no_leaks()


def test_open_and_start_said_twice_are_the_same_transfer() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.open_again(transfer)
    assert not pair.start(transfer)
    first, second = pair.router_heard(SinkReady)
    assert first == second
    assert pair.source.num_live == 1


def test_a_stale_answer_to_an_earlier_read_is_ignored() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.deliver_all()
    pair.do("sink", pair.sink.receive(pair.source_peer, Stale(transfer, 0, 7), 0.0))
    pair.do("sink", pair.sink.receive(pair.source_peer, Valid(transfer, 0, 1), 0.0))
    assert pair.sink_pool.num_cached == 0, "VALID before DONE says nothing about what landed"
    pair.settle()
    assert transfer in pair.ready


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_start_after_any_release_is_gone() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.settle()
    assert not pair.start(transfer)
    assert pair.router_heard(Gone) == [Gone(transfer, "start")]
    cancelled = pair.open(PROMPT, request="r2")
    pair.tell("source", Cancel(cancelled, "abort"))
    assert not pair.start(cancelled)


def test_open_after_its_cancel_is_gone() -> None:
    pair = HandoffPair()
    transfer = TransferId(RequestId("r"), 1, pair.source_incarnation, pair.sink_incarnation)
    pair.tell("sink", Cancel(transfer, "abort"))
    assert pair.open(PROMPT) == transfer
    assert pair.router_heard(Gone) == [Gone(transfer, "cancel"), Gone(transfer, "open")]
    assert pair.router_heard(SinkReady) == []


def test_closed_transfers_are_forgotten_after_their_deadline() -> None:
    pair = HandoffPair()
    transfer = started(pair, deadline_s=5.0)
    pair.tell("sink", Cancel(transfer, "abort"))
    pair.tell("source", Cancel(transfer, "abort"))
    pair.settle()
    pair.wait(6.0)
    assert pair.start(transfer, 0), "nobody sends a message after its request's deadline; memory must end"


def test_a_larger_attempt_drains_the_older_on_both_sides_and_a_smaller_is_gone() -> None:
    pair = HandoffPair()
    first = started(pair)
    pair.compute(first, 1)
    pair.deliver_all()
    second = started(pair, attempt=2)
    assert pair.dropped["sink", first].reason == "superseded"
    assert pair.dropped["source", first].reason == "superseded"
    pair.open_again(first)
    assert pair.to_router[-1] == Gone(first, "open")
    assert not pair.start(first, 0)
    pair.compute(second)
    pair.settle()
    assert second in pair.ready
    finish(pair, second)
    pair.assert_no_leaks()


def test_a_later_attempt_holds_what_is_sealed_before_the_earlier_lets_go() -> None:
    pair = HandoffPair(num_source_blocks=6)
    first = started(pair)
    pair.compute(first)
    sealed = pair.source_pool.held_by(Holder(HolderKind.SEALED, first))
    assert len(sealed) == 5
    pair.wire.clear()
    second = started(pair, attempt=2)
    inherited = Holder(HolderKind.SEALED, second)
    assert pair.source_pool.held_by(inherited) == sealed[:4]
    assert pair.source_pool.num_available == 2, "the half block may not be added to and is given back"
    pair.launch(second)
    assert pair.source_pool.held_by(inherited) == (), "its worker has pinned them now"
    pair.compute(second)
    pair.complete(pair.steps[0])
    pair.settle()
    assert second in pair.ready


def test_a_later_attempt_holds_nothing_that_its_worker_could_not_use() -> None:
    pair = HandoffPair(num_source_blocks=2)
    first = started(pair, range(8))
    pair.compute(first)
    pair.wire.clear()
    second = started(pair, range(8), attempt=2)
    assert pair.source_pool.held_by(Holder(HolderKind.SEALED, second)) == (0,), "the last block must be computed again"
    pair.compute(second)
    pair.settle()
    assert second in pair.ready


def test_a_message_of_another_attempt_or_incarnation_changes_nothing() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    for other in (transfer.__class__(transfer.request_id, 2, *list_ids(transfer)), replace_sink(transfer)):
        pair.do("source", pair.source.receive(pair.sink_peer, Taken(other, (0, 1, 2), True), 0.0))
        pair.do("source", pair.source.receive(ROUTER_LIKE, Cancel(other, "abort"), 0.0))
        pair.do("sink", pair.sink.receive(pair.source_peer, Failed(other, FailureKind.FATAL, "x", "x"), 0.0))
    assert pair.source.is_live(transfer)
    assert pair.sink.is_live(transfer)
    pair.settle()
    assert transfer in pair.ready


ROUTER_LIKE = HandoffPair().sink_peer


def list_ids(transfer: TransferId) -> tuple[Incarnation, Incarnation]:
    return transfer.source_incarnation, transfer.sink_incarnation


def replace_sink(transfer: TransferId) -> TransferId:
    return TransferId(transfer.request_id, transfer.attempt, transfer.source_incarnation, Incarnation(5))


# -- validation --------------------------------------------------------------------------------------------------------


def use_source_blocks(pair: HandoffPair) -> None:
    """Somebody else is handed every free source block, and gives it back."""
    stranger = Holder(HolderKind.REQUEST, "stranger")
    for block_id in pair.source_pool.allocate(pair.source_pool.num_available, stranger):
        pair.source_memory.block(block_id)[:] = b"\xee" * len(pair.source_memory.block(block_id))
    pair.source_pool.release_all(stranger)


def test_blocks_reused_under_a_read_are_never_committed() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    pair.do("source", pair.source.tick(pair.now_s + pair.timers.lease_s + 1))
    assert pair.dropped["source", transfer].reason == "lease_ended"
    use_source_blocks(pair)
    pair.settle()
    assert transfer not in pair.ready
    assert failures(pair) == ["source_gone"]
    pair.assert_no_leaks()


def test_after_a_lease_blocks_that_nobody_took_are_still_valid() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    pair.do("source", pair.source.tick(pair.now_s + pair.timers.lease_s + 1))
    pair.settle()
    assert transfer in pair.ready


def test_a_stale_chunk_is_asked_for_again_and_it_alone() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.deliver_all()
    pair.land_all()
    pair.poll_reads()
    pair.drop(Validate)
    pair.do("sink", pair.sink.receive(pair.source_peer, Stale(transfer, 0, 1), 0.0))
    assert pair.wire[-1][2] == Resend(transfer, (0,), False)
    pair.settle()
    assert transfer in pair.ready


def test_a_chunk_that_stays_stale_is_given_up() -> None:
    pair = HandoffPair(timers=ProtocolTimers(max_reads_per_chunk=2))
    transfer = started(pair, range(8))
    pair.compute(transfer)
    for read_number in (1, 2):
        pair.deliver_all()
        pair.land_all()
        pair.poll_reads()
        pair.drop(Validate)
        pair.do("sink", pair.sink.receive(pair.source_peer, Stale(transfer, 0, read_number), 0.0))
    pair.settle()
    assert failures(pair) == ["stale"]
    pair.assert_no_leaks()


def test_a_seal_after_resend_may_name_other_blocks() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.deliver_all()
    pair.land_all()
    pair.poll_reads()
    pair.drop(Validate)
    seal = Seal(transfer, 0, 0, 8, (SealedBlock(9, 1), SealedBlock(8, 1)), 3)  # type: ignore[arg-type]
    assert pair.sink.receive(pair.source_peer, seal, 0.0) == [], "a duplicate while the first is not stale"
    pair.do("sink", pair.sink.receive(pair.source_peer, Stale(transfer, 0, 1), 0.0))
    pair.do("sink", pair.sink.receive(pair.source_peer, seal, 0.0))
    assert pair.events[-1].remote_ids == (9, 8)  # type: ignore[union-attr]


def test_gone_in_answer_to_validate_means_stale_and_then_the_end() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    pair.tell("source", Cancel(transfer, "abort"))
    pair.settle()
    assert failures(pair) == ["source_gone"]
    pair.assert_no_leaks()


def test_validate_names_what_was_read() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    for block, answer in ((SealedBlock(0, 1), Valid), (SealedBlock(0, 2), Stale), (SealedBlock(99, 1), Stale), (SealedBlock(-1, 1), Stale)):  # type: ignore[arg-type]
        (effect,) = pair.source.receive(pair.sink_peer, Validate(transfer, 0, 3, (block,)), 0.0)
        assert effect.message == answer(transfer, 0, 3)  # type: ignore[union-attr]


# -- the record --------------------------------------------------------------------------------------------------------


def test_a_record_for_another_index_is_unusable_but_an_answer() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    while pair.launch(transfer):
        pair.complete(pair.steps[-1], record_index=3)
    pair.settle()
    assert transfer in pair.ready
    assert pair.sink.record(transfer) is None
    assert not [effect for effect in pair.events if isinstance(effect, RecordArrived)]
    assert pair.dropped["source", transfer].reason == "taken"


def test_a_record_whose_digest_does_not_fit_is_unusable() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    (index,) = pair.on_wire(Complete)
    sender, receiver, message = pair.wire[index]
    assert isinstance(message, Complete)
    pair.wire[index] = sender, receiver, msgspec.structs.replace(message, record=msgspec.structs.replace(message.record, token=43))
    pair.settle()
    assert transfer in pair.ready
    assert pair.sink.record(transfer) is None


def test_token_zero_may_be_shown_before_the_blocks_are_here() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    record = pair.sink.record(transfer)
    assert record is not None
    assert record.token == 42
    assert transfer not in pair.ready


def test_the_source_waits_for_the_record_to_be_taken_too() -> None:
    pair = HandoffPair()
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.do("source", pair.source.receive(pair.sink_peer, Taken(transfer, (0,), False), 0.0))
    assert pair.source.is_live(transfer)
    pair.do("source", pair.source.receive(pair.sink_peer, Taken(transfer, (0,), True), 0.0))
    assert not pair.source.is_live(transfer)


# -- credit, growth, preemption ----------------------------------------------------------------------------------------


def test_credit_is_promised_to_nobody_else_and_late_blocks_stay_cached_until_needed() -> None:
    pair = HandoffPair(num_sink_blocks=8)
    first = pair.open(range(16), request="a", max_tokens=8)
    assert pair.sink.num_reserved_blocks == 6
    assert pair.sink_pool.num_free == 8
    pair.open(range(200, 212), request="b")
    assert isinstance(pair.to_router[-1], SinkBusy)
    pair.tell("sink", Cancel(first, "abort"))
    pair.open(range(200, 212), request="b", attempt=2)
    assert isinstance(pair.to_router[-1], SinkReady)


def test_credit_covers_at_most_the_configured_output() -> None:
    pair = HandoffPair(timers=ProtocolTimers(credit_output_tokens=8))
    pair.open(range(8), max_tokens=10_000)
    assert pair.sink.num_reserved_blocks == 4


def test_growth_takes_the_credit_first_and_then_only_what_is_promised_to_nobody() -> None:
    pair = HandoffPair(num_sink_blocks=8)
    first = pair.open(range(8), request="a", local=True, max_tokens=4)
    pair.open(range(100, 108), request="b", max_tokens=4)
    pair.sink.grow(first, 1)
    assert pair.sink.num_reserved_blocks == 3
    pair.sink.grow(first, 2)
    with pytest.raises(PoolExhausted, match="promised"):
        pair.sink.grow(first, 1)
    assert len(pair.sink.block_table(first)) == 5


def test_a_busy_worker_answers_busy_and_remembers_nothing() -> None:
    pair = HandoffPair()
    transfer = pair.open(PROMPT)
    pair.tell("sink", Cancel(transfer, "x"))
    message = msgspec.structs.replace(pair.opened[transfer], transfer=msgspec.structs.replace(transfer, attempt=2))
    (busy,) = pair.sink.open(message, pair.sink_peer, pair.source_peer, 0.0, busy_s=2.5)
    assert busy.message == SinkBusy(message.transfer, 2.5)  # type: ignore[union-attr]
    (ready,) = pair.sink.open(message, pair.sink_peer, pair.source_peer, 0.0)
    assert isinstance(ready.message, SinkReady)  # type: ignore[union-attr]


def test_a_preempted_request_gives_its_blocks_up_and_is_filled_again() -> None:
    pair = HandoffPair(num_sink_blocks=6)
    transfer = started(pair)
    pair.compute(transfer)
    pair.settle()
    pair.do("sink", pair.sink.running(transfer, 0.0))
    pair.do("sink", pair.sink.preempted(transfer, 0.0))
    assert pair.sink_pool.num_available == 6
    assert pair.sink.block_table(transfer) == ()
    tokens = pack_tokens([*PROMPT, 42, 43])
    pair.do("sink", pair.sink.resume(transfer, tokens, 0.0))
    assert pair.events[-1] == FillLocally(transfer, 16)
    assert len(pair.sink.block_table(transfer)) == 5
    late = Seal(transfer, 0, 0, 8, (SealedBlock(0, 1), SealedBlock(1, 1)), 3)  # type: ignore[arg-type]
    assert pair.sink.receive(pair.source_peer, late, 0.0) == []
    pair.do("sink", pair.sink.receive(pair.source_peer, Progress(transfer, "complete", 18, 0, 3), 0.0))
    pair.do("sink", pair.sink.filled_locally(transfer, 0.0))
    finish(pair, transfer)
    pair.assert_no_leaks()


def test_resuming_without_room_changes_nothing() -> None:
    pair = HandoffPair(num_sink_blocks=6)
    transfer = pair.open(range(8), request="a", local=True)
    pair.do("sink", pair.sink.filled_locally(transfer, 0.0))
    pair.do("sink", pair.sink.preempted(transfer, 0.0))
    pair.open(range(100, 116), request="b")
    with pytest.raises(PoolExhausted):
        pair.sink.resume(transfer, pack_tokens(range(9)), 0.0)
    assert pair.sink_pool.audit().is_quiesced
    assert pair.sink.is_live(transfer)


# -- time --------------------------------------------------------------------------------------------------------------


def test_keep_renews_the_lease_of_what_was_announced() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    pair.settle()
    for _ in range(20):
        pair.wait(3.0)
        assert pair.on_wire(Keep)
        pair.deliver_all()
    assert pair.source.is_live(transfer)


def test_keep_is_not_said_before_the_source_was_heard() -> None:
    pair = HandoffPair()
    pair.open(PROMPT)
    pair.wait(7.0)
    assert pair.wire == []


def test_keep_of_an_unknown_transfer_is_gone() -> None:
    pair = HandoffPair()
    transfer = TransferId(RequestId("r"), 1, pair.source_incarnation, pair.sink_incarnation)
    (effect,) = pair.source.receive(pair.sink_peer, Keep((transfer,)), 0.0)
    assert effect.message == Gone(transfer, "keep")  # type: ignore[union-attr]


def test_a_queue_at_the_source_is_no_lack_of_progress() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    for _ in range(60):
        pair.wait(1.0)
        pair.settle()
    assert pair.sink.is_live(transfer)
    pair.compute(transfer)
    pair.settle()
    assert transfer in pair.ready


def test_a_sink_gives_a_silent_source_up_but_only_after_it_was_heard() -> None:
    pair = HandoffPair()
    unheard = pair.open(PROMPT, request="a")
    heard = started(pair, request="b")
    pair.settle()
    for _ in range(11):
        pair.wait(1.0)
        pair.wire.clear()
    assert failures(pair) == ["no_progress"]
    assert pair.sink.is_live(unheard)
    assert not pair.sink.is_live(heard)


def test_deadlines_end_both_sides() -> None:
    pair = HandoffPair()
    transfer = started(pair, deadline_s=5.0)
    pair.compute(transfer, 1)
    pair.deliver_all()
    pair.wait(6.0)
    assert {pair.dropped["source", transfer].reason, pair.dropped["sink", transfer].reason} == {"deadline_exceeded"}
    pair.settle()
    pair.assert_no_leaks()


# -- READs that do not end well ----------------------------------------------------------------------------------------


def test_an_aborted_read_is_drained_before_its_blocks_go_back() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    pair.tell("sink", Cancel(transfer, "abort"))
    assert pair.dropped["sink", transfer].reason == "abort"
    assert pair.router_heard(Closed) == []
    assert pair.sink_pool.num_free == 11, "blocks under a READ are not free"
    pair.open_again(transfer)
    assert pair.to_router[-1] == Gone(transfer, "open")
    pair.settle()
    assert pair.router_heard(Closed) == [Closed(transfer, "abort")]
    assert pair.sink_pool.num_free == 16
    pair.assert_no_leaks()


def test_a_slow_read_is_suspect_and_a_hanging_one_ends_with_its_agent() -> None:
    pair = HandoffPair(plan=FaultPlan(hang_rate=1.0))
    transfer = started(pair)
    pair.compute(transfer)
    pair.deliver_all()
    for _ in range(11):
        pair.wait(0.5)
        pair.deliver_all()
    assert pair.events.count(SuspectPeer(pair.source_peer)) == 3
    assert pair.sink_pool.num_free == 11
    for _ in range(60):
        pair.wait(0.5)
        pair.deliver_all()
    assert pair.events.count(DestroyAgent(pair.source_peer)) == 1
    assert failures(pair) == ["read_failed"]
    pair.settle()
    pair.assert_no_leaks()
    assert pair.sink_pool.num_quarantined == 0


def test_where_destroying_is_not_proven_blocks_stay_in_quarantine() -> None:
    pair = HandoffPair(plan=FaultPlan(error_rate=1.0, destroying_proven=False, max_delay_s=5.0, min_delay_s=5.0))
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.deliver_all()
    pair.poll_reads()
    assert failures(pair) == ["read_failed"]
    assert pair.sink_pool.num_quarantined == 2
    pair.settle()
    pair.fabric.advance(10.0)
    pair.assert_no_leaks()


def test_an_error_is_not_done_and_fails_only_what_reads_from_that_peer() -> None:
    pair = HandoffPair(plan=FaultPlan(error_rate=1.0))
    local = pair.open(range(50, 58), request="local", local=True)
    transfer = started(pair, range(8))
    pair.compute(transfer)
    pair.deliver_all()
    pair.poll_reads()
    assert failures(pair) == ["read_failed"]
    assert pair.sink.is_live(local)
    pair.settle()
    assert pair.fabric.foreign_bytes == []


def test_a_seal_that_comes_while_an_agent_is_destroyed_is_not_read() -> None:
    pair = HandoffPair()
    first, second = started(pair, range(8), request="a"), started(pair, range(50, 58), request="b")
    pair.compute(first)
    pair.compute(second)
    pair.deliver(pair.on_wire(Seal)[0])
    effects = pair.sink.read_failed(1, _lost(), 0.0)
    assert DestroyAgent(pair.source_peer) in effects
    pair.deliver(pair.on_wire(Seal)[0])
    assert "pair_down" in failures(pair)
    pair.do("sink", pair.sink.agent_destroyed(pair.source_peer, 0.0))
    assert pair.sink_pool.audit().is_quiesced


def _lost() -> Exception:
    from kv_transfer.errors import PeerLost

    return PeerLost("gone")


# -- who dies ----------------------------------------------------------------------------------------------------------


def test_the_gateways_death_cancels_what_it_opened() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    pair.deliver_all()
    router = pair.source._live[transfer].router
    pair.do("source", pair.source.peer_lost(router, 0.0))
    pair.do("sink", pair.sink.peer_lost(router, 0.0))
    pair.settle()
    pair.assert_no_leaks()


def test_the_sources_death_is_retryable_and_keeps_what_was_committed() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    pair.settle()
    pair.compute(transfer, 1)
    pair.deliver_all()
    pair.do("sink", pair.sink.peer_lost(pair.source_peer, 0.0))
    (failed,) = pair.router_heard(Failed)
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.code) == (FailureKind.RETRYABLE_ELSEWHERE, "source_lost")
    pair.start_source_process()
    pair.settle()
    again = started(pair, attempt=2)
    assert pair.sink.have_tokens(again) == 2 * BLOCK_SIZE
    pair.compute(again)
    pair.settle()
    assert again in pair.ready


def test_the_sources_death_after_everything_was_taken_is_nothing() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    pair.settle()
    pair.do("sink", pair.sink.peer_lost(pair.source_peer, 0.0))
    pair.do("sink", pair.sink.receive(pair.source_peer, Gone(transfer, "keep"), 0.0))
    pair.do("sink", pair.sink.receive(pair.source_peer, Failed(transfer, FailureKind.FATAL, "x", "x"), 0.0))
    assert pair.sink.is_live(transfer)


def test_the_sinks_death_releases_the_source() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    pair.do("source", pair.source.peer_lost(pair.sink_peer, 0.0))
    assert pair.source_pool.audit().is_quiesced
    assert failures(pair) == ["sink_lost"]


def test_a_restarted_sink_answers_gone_and_the_source_lets_go() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer, 1)
    old_wire = list(pair.wire)
    pair.start_sink_process()
    pair.wire = [(sender, pair.sink_peer, message) for sender, _, message in old_wire]
    pair.settle()
    assert not pair.source.is_live(transfer)
    assert pair.source_pool.audit().is_quiesced


def test_a_worker_that_fails_tells_router_and_sink() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.do("source", pair.source.fail(transfer, FailureKind.REQUEST_FAULT, "too_long", "the prompt is too long", 0.0))
    pair.settle()
    assert failures(pair) == ["too_long", "too_long"]
    pair.assert_no_leaks()


def test_a_source_that_cancels_fails_what_needs_it() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.settle()
    pair.do("sink", pair.sink.receive(pair.source_peer, Closed(transfer, "draining"), 0.0))
    assert failures(pair) == ["source_gone"]


# -- what a correct source never says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"start": 2},
        {"end": 7},
        {"end": 40},
        {"blocks": ()},
        {"component_mask": 1},
        {"layer_range": (0, 1)},
        {"start": 8, "end": 4},
    ],
    ids=str,
)
def test_a_seal_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    pair = HandoffPair()
    transfer = started(pair)
    seal = Seal(transfer, 0, 0, 8, (SealedBlock(0, 1), SealedBlock(1, 1)), 3)  # type: ignore[arg-type]
    pair.do("sink", pair.sink.receive(pair.source_peer, msgspec.structs.replace(seal, **change), 0.0))
    assert failures(pair) == ["protocol_mismatch"]


def test_chunks_that_overlap_are_refused() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    blocks = (SealedBlock(0, 1), SealedBlock(1, 1))  # type: ignore[arg-type]
    pair.do("sink", pair.sink.receive(pair.source_peer, Seal(transfer, 0, 0, 8, blocks, 3), 0.0))
    pair.do("sink", pair.sink.receive(pair.source_peer, Seal(transfer, 1, 4, 12, blocks, 3), 0.0))
    assert failures(pair) == ["protocol_mismatch"]


def test_chunks_that_leave_a_hole_never_make_a_request_ready() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.compute(transfer)
    (index,) = pair.on_wire(Complete)
    sender, receiver, message = pair.wire[index]
    assert isinstance(message, Complete)
    pair.drop(Seal)
    (index,) = pair.on_wire(Complete)
    pair.wire[index] = sender, receiver, msgspec.structs.replace(message, num_chunks=0)
    pair.settle()
    assert failures(pair) == ["protocol_mismatch"]
    assert not [effect for effect in pair.events if isinstance(effect, Ready)]


def test_ask_about_an_unknown_transfer_is_gone_and_about_a_known_one_the_workers_business() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    assert pair.sink.receive(pair.sink_peer, Ask(transfer, 0), 0.0) == []
    pair.tell("sink", Cancel(transfer, "x"))
    pair.settle()
    (effect,) = pair.sink.receive(pair.sink_peer, Ask(transfer, 0), 0.0)
    assert effect.message == Gone(transfer, "ask")  # type: ignore[union-attr]


def test_calls_for_a_transfer_that_has_ended_do_nothing() -> None:
    pair = HandoffPair()
    transfer = started(pair)
    pair.tell("sink", Cancel(transfer, "x"))
    pair.tell("source", Cancel(transfer, "x"))
    pair.settle()
    source, sink = pair.source, pair.sink
    assert source.computing(transfer, 0.0) == source.seal(transfer, 0, 4, (), 0.0) == []
    assert source.fail(transfer, FailureKind.FATAL, "x", "x", 0.0) == []
    assert sink.running(transfer, 0.0) == sink.finished(transfer, 0.0) == sink.preempted(transfer, 0.0) == []
    assert sink.filled_locally(transfer, 0.0) == sink.read_done(99, 0.0) == sink.read_failed(99, _lost(), 0.0) == []  # type: ignore[arg-type]
    sink.grow(transfer, 1)
    assert sink.block_table(transfer) == ()
    pair.assert_no_leaks()


def test_the_rank_that_serves_a_block_is_by_its_place_in_the_sequence_and_not_by_its_id() -> None:
    pair = HandoffPair(source_sharding=CacheSharding.replicated(2), sink_sharding=CacheSharding.by_block(2))
    stranger = Holder(HolderKind.REQUEST, "stranger")
    pair.source_pool.allocate(1, stranger)  # from here on every id is its place plus one
    transfer = pair.open(range(5 * 4), max_tokens=1)
    pair.start(transfer)
    pair.compute(transfer)
    sealed = [block for index in pair.on_wire(Seal) for block in pair.wire[index][2].blocks]  # type: ignore[union-attr]
    assert [(block.block_id, block.rank) for block in sealed] == [(1, 0), (2, 1), (3, 0), (4, 1), (5, 0)]
    pair.settle()
    assert transfer in pair.ready
    assert [block_id % 2 for block_id in pair.sink.block_table(transfer)] == [0, 1, 0, 1, 0]


def test_blocks_that_ranks_share_are_held_until_they_are_copied_whatever_becomes_of_the_request() -> None:
    pair = HandoffPair(sink_sharding=CacheSharding.replicated(2))
    transfer = pair.open(range(10), max_tokens=1)
    pair.start(transfer)
    pair.compute(transfer)
    pair.settle()
    assert transfer in pair.ready
    pair.share()
    pair.tell("sink", Cancel(transfer, "x"))
    pair.settle()
    pair.assert_no_leaks()

    later = pair.open(range(50, 60), request="s", max_tokens=1)
    pair.start(later)
    pair.launch(later)
    pair.complete(pair.steps[-1])
    pair.settle()
    table = pair.sink.block_table(later)
    pair.tell("sink", Cancel(later, "x"))
    pair.settle()
    assert all(EXCHANGE in pair.sink_pool.holders(block_id) for block_id in table), "the next step copies them"
    assert [copy.rank for effect in pair.to_share for copy in effect.copies] == [0, 1]
    pair.assert_no_leaks()
