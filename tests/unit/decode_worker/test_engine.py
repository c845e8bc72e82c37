"""The decode engine on the bench: what is emitted, who is preempted, what is cached, and what a launched step protects."""

import dataclasses

import pytest

from decode_worker.batch import DecodeBatch
from decode_worker.config import DecodeConfig
from decode_worker.draft_controller import DraftController
from decode_worker.sequences import Phase
from kv_transfer.block_keys import block_keys
from kv_transfer.geometry import CacheSharding
from kv_transfer.identity import RequestId, pack_tokens
from kv_transfer.messages import FailureKind, FinishReason, SamplingParameters, Tokens
from tests.fakes.toy_model import BLOCK_SIZE_TOKENS, toy_generate
from tests.fakes.worker_bench import BenchRequest, World


def local_request(name: str, num_tokens: int, max_tokens: int, **sampling: object) -> BenchRequest:
    parameters = SamplingParameters(max_tokens=max_tokens, seed=1, **sampling)  # type: ignore[arg-type]
    return BenchRequest(RequestId(name), [(len(name) * 7 + i) % 50 for i in range(num_tokens)], parameters, is_local=True)


def open_all(world: World, *requests: BenchRequest) -> None:
    for request in requests:
        world.router.submit(request)
    world.router.tick(world.now_s)
    while world.deliver_one():
        pass


def test_a_stop_token_is_the_last_token_and_nothing_follows_it() -> None:
    free = toy_generate([(14 + i) % 50 for i in range(5)], SamplingParameters(max_tokens=20, seed=1))
    stop = free[6]
    world = World()
    request = local_request("ab", 5, 20, stop_token_ids=(stop,))
    open_all(world, request)
    world.settle()
    assert request.output == free[: free.index(stop) + 1]
    assert request.finish is FinishReason.STOP


def test_one_frame_per_step_and_gateway() -> None:
    world = World()
    open_all(world, local_request("a", 5, 6), local_request("b", 9, 6), local_request("c", 3, 6))
    decode = world.decodes[0]
    decode.turn(world.now_s)
    before = len(world.wire.sent)
    assert decode.turn(world.now_s)
    frames = [message for sender, _, message in world.wire.sent[before:] if sender == decode.me.peer_id]
    assert len(frames) == 1
    assert isinstance(frames[0], Tokens)
    assert [len(delta.tokens) for delta in frames[0].deltas] == [1, 1, 1]


def test_blocks_of_a_step_in_flight_are_not_handed_out_when_its_sequence_is_cancelled() -> None:
    world = World(decode_blocks=4)
    request = local_request("a", 20, 4)
    open_all(world, request)
    decode = world.decodes[0]
    assert decode.launch(world.now_s)
    world.router.cancel(request.request_id)
    while world.deliver_one():
        pass
    assert decode.num_live == 0
    assert decode.model.pool.num_available < 4, "the step still stores into these blocks"
    decode.land(world.now_s)
    assert decode.model.pool.num_available == 4
    assert request.output == []


def test_a_preempted_sequence_resumes_with_the_same_text() -> None:
    config = DecodeConfig(max_running=4, max_chunk_tokens=16)
    world = World(decode_blocks=12, decode_config=config)
    requests = [local_request(name, 8, 70) for name in ("a", "bb")]
    open_all(world, *requests)
    world.settle()
    assert world.decodes[0].engine.num_preemptions >= 1
    for request in requests:
        assert request.attempt == 1
        assert request.output == toy_generate(request.prompt, request.sampling)


def test_nobody_new_is_taken_while_somebody_is_preempted() -> None:
    world = World(decode_blocks=12)
    old = [local_request(name, 8, 70) for name in ("a", "bb")]
    open_all(world, *old)
    decode = world.decodes[0]
    while not decode.sequences.in_phase(Phase.PREEMPTED):
        decode.turn(world.now_s)
    late = local_request("ccc", 3, 2)
    open_all(world, late)
    assert late.transfer is None, "BUSY sends it away"
    world.settle()
    assert late.output == toy_generate(late.prompt, late.sampling)


def test_blocks_that_the_answer_fills_are_found_by_the_next_turn() -> None:
    world = World()
    first = local_request("a", 10, 30)
    open_all(world, first)
    world.settle()
    second = BenchRequest(RequestId("next"), first.prompt + first.output + [7], first.sampling, is_local=True)
    open_all(world, second)
    world.settle()
    num_stored = len(first.prompt) + len(first.output) - 1
    assert second.num_cached_tokens == num_stored // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    keys = block_keys(pack_tokens(second.prompt), b"", BLOCK_SIZE_TOKENS, looks_one_token_ahead=False)
    assert len(world.decodes[0].model.pool.lookup(keys)) >= num_stored // BLOCK_SIZE_TOKENS


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_pulled_prompt_that_ends_at_a_block_s_edge_is_cached_whole_with_its_only_token(max_drafts: int) -> None:
    """Token 0 ends the answer, and the block's key looks at it: no row is ever stored after the block."""
    world = World(max_drafts=max_drafts)
    decode, gateway = world.decodes[0], world.router.me.peer_id
    request = BenchRequest(RequestId("a"), list(range(16)), SamplingParameters(max_tokens=1, seed=1))
    open_all(world, request)
    world.prefills[0].turn(world.now_s)
    for _ in range(20):  # the gateway, which would cancel what has ended, hears nothing until the blocks are here
        while world.deliver_one(lambda _sender, to: to != gateway):
            pass
        world.pass_time(0.05)
    world.settle()
    assert len(request.output) == 1
    keys = block_keys(pack_tokens(request.prompt + request.output), b"", BLOCK_SIZE_TOKENS, looks_one_token_ahead=max_drafts > 0)
    assert len(decode.model.pool.lookup(keys)) == 2


def test_a_request_that_cannot_fit_alone_is_refused_with_the_numbers() -> None:
    world = World(decode_blocks=4)
    request = local_request("a", 20, 30)
    open_all(world, request)
    assert request.failure is not None
    assert request.failure.kind is FailureKind.REQUEST_FAULT
    assert request.failure.code == "context_length_exceeded"
    assert "20" in request.failure.message
    assert "33" in request.failure.message


def test_a_running_batch_decodes_beside_a_long_local_prompt() -> None:
    world = World(decode_blocks=60, max_step_tokens=32, decode_config=DecodeConfig(max_running=8, max_chunk_tokens=8))
    short = local_request("a", 3, 30)
    open_all(world, short)
    decode = world.decodes[0]
    decode.turn(world.now_s)
    long = local_request("bb", 100, 2)
    open_all(world, long)
    num_emitted = []
    while decode.sequences.in_phase(Phase.FILLING):
        decode.turn(world.now_s)
        while world.deliver_one():
            pass
        num_emitted.append(len(short.output))
    assert len(num_emitted) >= 12, "the prompt is cut into chunks of the share that it may take beside rows"
    assert num_emitted == sorted(set(num_emitted)), "every step of the long prompt also moved the short answer on"
    world.settle()


def test_what_publishing_takes_is_part_of_a_step() -> None:
    world = World(max_drafts=2)
    open_all(world, local_request("a", 5, 100))
    decode = world.decodes[0]
    decode.engine.drafts = DraftController(dataclasses.replace(decode.model, adapts_drafts=True))
    now_s = world.now_s
    while decode.launch(now_s):
        decode.land(now_s + 0.01)
        now_s += 0.015
    assert 0.01 < decode.engine.drafts._costs.costs().overhead_s <= 0.0151, "the toy's model takes no time; an average comes from below"


@pytest.mark.parametrize("max_drafts", [0, 1])
def test_steps_that_look_for_no_blocks_have_room(max_drafts: int) -> None:
    world = World(decode_blocks=200, max_drafts=max_drafts)
    requests = [local_request("a" * count, BLOCK_SIZE_TOKENS * count, 40 + 7 * count) for count in range(1, 7)]
    coming = list(requests)
    decode = world.decodes[0]
    ahead: list[int] = []
    while coming or decode.num_live:
        if coming and len(ahead) % 4 == 0:  # who joins has no slot left in its blocks
            open_all(world, coming.pop())
        decode.turn(world.now_s)
        ahead.append(decode.engine.num_roomy_steps)
        for sequence in decode.sequences.in_phase(Phase.RUNNING):
            assert sequence.num_stored_tokens <= len(sequence.block_table) * BLOCK_SIZE_TOKENS
        while world.deliver_one():
            pass
    assert sum(map(bool, ahead)) > len(ahead) // 4, "blocks are looked for in some steps, not in all"
    for request in requests:
        assert request.output == toy_generate(request.prompt, request.sampling)


def test_nothing_is_emitted_for_a_request_that_is_cancelled_while_its_step_runs() -> None:
    world = World()
    stays, goes = local_request("a", 5, 9), local_request("bb", 5, 9)
    open_all(world, stays, goes)
    decode = world.decodes[0]
    decode.turn(world.now_s)
    assert decode.launch(world.now_s)
    world.router.cancel(goes.request_id)
    while world.deliver_one():
        pass
    before = len(world.wire.sent)
    decode.land(world.now_s)
    deltas = [delta for _, _, message in world.wire.sent[before:] if isinstance(message, Tokens) for delta in message.deltas]
    assert [delta.transfer for delta in deltas] == [stays.transfer]


def test_what_an_awaited_grammar_holds_back_joins_the_batch_when_it_has_come() -> None:
    world = World()
    open_all(world, local_request("a", 5, 9))
    decode = world.decodes[0]
    decode.turn(world.now_s)
    (sequence,) = decode.sequences.in_phase(Phase.RUNNING)
    batch = DecodeBatch()
    seen = []
    for awaits in (None, True, False):
        if awaits is True:
            decode.sequences.await_grammar(sequence)
        elif awaits is False:
            decode.sequences.take_grammar(sequence, None)
        batch.refresh(decode.sequences)
        seen.append(batch.ids)
    assert seen == [(sequence.sequence_id,), (), (sequence.sequence_id,)]


def test_blocks_that_ranks_have_still_to_copy_are_copied_by_the_next_step_and_by_then_nobody_counts_on_them() -> None:
    world = World(decode_sharding=CacheSharding.replicated(2))
    prefill, decode = world.prefills[0], world.decodes[0]
    request = BenchRequest(RequestId("a"), list(range(20)), SamplingParameters(max_tokens=9, seed=1))
    open_all(world, request)
    while not decode.sequences.in_phase(Phase.RUNNING):
        prefill.turn(world.now_s)
        world.pass_time(0.05)
        while world.deliver_one():
            pass
    (sequence,) = decode.sequences.in_phase(Phase.RUNNING)
    credit = decode.receiver.credit_blocks(sequence)
    assert decode.engine._freed_blocks(sequence) == (credit,), "preempting it frees no block that the next step writes"
    assert decode.launch(world.now_s)
    assert decode.step is not None
    assert [(copy.block_id, copy.rank) for copy in decode.step.plan.copies] == [
        (sequence.block_table[place], place % 2) for place in range(3)
    ]
    decode.land(world.now_s)
    assert decode.engine._freed_blocks(sequence) == (len(sequence.block_table) + decode.receiver.credit_blocks(sequence),)
    world.settle()
    assert request.output == toy_generate(request.prompt, request.sampling)


def test_a_step_may_do_nothing_but_copy() -> None:
    world = World(decode_sharding=CacheSharding.replicated(2), max_step_tokens=16)
    prefill, decode = world.prefills[0], world.decodes[0]
    request = BenchRequest(RequestId("a"), list(range(30)), SamplingParameters(max_tokens=3, seed=1))
    open_all(world, request)
    prefill.turn(world.now_s)
    while not decode.launch(world.now_s):
        world.pass_time(0.05)
        while world.deliver_one():
            pass
    assert decode.step is not None
    assert decode.step.plan.slices == ()
    assert len(decode.step.plan.copies) == 2
    decode.land(world.now_s)
    world.settle()
    assert request.output == toy_generate(request.prompt, request.sampling)
