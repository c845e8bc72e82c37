"""What the receiver answers: refusals, BUSY, ASK, and the token that came with the record."""

import msgspec

from decode_worker.config import DecodeConfig
from decode_worker.sequences import Phase
from kv_transfer.handoff import seal_record
from kv_transfer.identity import PeerId, RequestId
from kv_transfer.messages import Ask, Complete, Failed, FailureKind, FinishReason, Gone, SamplingParameters, Seal, SinkBusy, Tokens
from tests.fakes.toy_grammars import CHARACTERS, END, TOY_GRAMMARS
from tests.fakes.toy_model import toy_generate, toy_logprobs
from tests.fakes.worker_bench import BenchRequest, World


def request(name: str, num_tokens: int, max_tokens: int, *, is_local: bool = False, seed: int = 1) -> BenchRequest:
    prompt = [(len(name) * 7 + i) % 50 for i in range(num_tokens)]
    return BenchRequest(RequestId(name), prompt, SamplingParameters(max_tokens=max_tokens, seed=seed), is_local=is_local)


def open_all(world: World, *requests: BenchRequest) -> None:
    for each in requests:
        world.router.submit(each)
    world.router.tick(world.now_s)
    while world.deliver_one():
        pass


def said_to_router(world: World, kind: type) -> list[object]:
    return [message for _, to, message in world.wire.sent if to == world.router.me.peer_id and isinstance(message, kind)]


def spoil(message: Complete) -> Complete:
    return msgspec.structs.replace(message, record=msgspec.structs.replace(message.record, token=49))


def test_a_full_worker_says_busy() -> None:
    world = World(decode_config=DecodeConfig(max_running=1, max_chunk_tokens=16, busy_retry_after_s=0.7))
    open_all(world, request("a", 5, 5, is_local=True), request("b", 5, 5, is_local=True))
    assert [message.retry_after_s for message in said_to_router(world, SinkBusy)] == [0.7]  # type: ignore[attr-defined]
    world.settle()


def test_a_bad_token_id_is_the_request_s_fault() -> None:
    world = World()
    bad = request("a", 5, 5)
    bad.prompt[2] = 50
    open_all(world, bad)
    assert bad.failure is not None
    assert bad.failure.kind is FailureKind.REQUEST_FAULT
    assert world.decodes[0].num_live == 0


def test_a_draining_worker_sends_new_requests_elsewhere_and_ends_the_old() -> None:
    world = World(num_decodes=2, seed=3)
    first = [request(name, 9, 9) for name in ("a", "bb", "ccc", "dddd")]
    open_all(world, *first)
    world.decodes[0].receiver.start_draining()
    late = [request(name * 5, 9, 9) for name in ("a", "bb", "ccc", "dddd")]
    open_all(world, *late)
    world.settle()
    assert all(each.output == toy_generate(each.prompt, each.sampling) for each in first + late)


def test_the_record_s_token_is_shown_before_its_blocks_are_here() -> None:
    world = World()
    asked = request("a", 20, 5)
    open_all(world, asked)
    world.prefills[0].turn(world.now_s)
    while world.deliver_one():
        pass
    assert asked.output == toy_generate(asked.prompt, asked.sampling)[:1]
    assert world.decodes[0].model.pool.audit().holders["handle"] > 0, "its blocks are still on their way"
    world.settle()


def test_a_record_that_ends_the_request_needs_no_step_but_its_blocks_are_kept() -> None:
    world = World()
    asked = request("a", 20, 1)
    open_all(world, asked)
    prefill, decode, router = world.prefills[0], world.decodes[0], world.router.me.peer_id
    prefill.turn(world.now_s)
    for _ in range(10):  # everything but what the router would say to the end of its request
        while world.deliver_one(lambda _sender, to: to != router):
            pass
        world.pass_time(0.01)
    assert decode.sequences.in_phase(Phase.FINISHED)
    assert decode.model.runner.num_tokens == 0
    world.settle()
    assert asked.finish is FinishReason.LENGTH
    again = request("a", 20, 1)
    again.request_id = RequestId("again")
    open_all(world, again)
    assert again.need_from == 16
    world.settle()


def _spoil_record(world: World, **changes: object) -> None:
    """Change the record on its way, under a seal of its own: only who reads its sense can tell."""
    queue = world.wire.queues[world.prefills[0].me.peer_id, world.decodes[0].me.peer_id]
    spoilt = [
        msgspec.structs.replace(message, record=seal_record(msgspec.structs.replace(message.record, **changes)))
        if isinstance(message, Complete)
        else message
        for message in queue
    ]
    assert spoilt != list(queue), "the record has not been sent yet"
    queue.clear()
    queue.extend(spoilt)


def _constrained(name: str, num_tokens: int) -> BenchRequest:
    asked = request(name, num_tokens, 12)
    asked.sampling = msgspec.structs.replace(asked.sampling, grammar=TOY_GRAMMARS[0], stop_token_ids=(END,))
    return asked


def test_a_record_of_another_grammar_state_sends_the_request_elsewhere() -> None:
    world = World()
    asked = _constrained("a", 20)
    open_all(world, asked)
    world.prefills[0].turn(world.now_s)
    _spoil_record(world, grammar_digest=b"another library")
    world.settle()
    failures = said_to_router(world, Failed)
    assert [(failed.kind, failed.code) for failed in failures] == [(FailureKind.RETRYABLE_ELSEWHERE, "grammar_mismatch")]  # type: ignore[attr-defined]
    assert asked.attempt == 2
    assert asked.output == toy_generate(asked.prompt, asked.sampling)


def test_a_record_whose_token_breaks_the_grammar_is_shown_to_nobody() -> None:
    world = World()
    asked = _constrained("a", 20)
    open_all(world, asked)
    world.prefills[0].turn(world.now_s)
    _spoil_record(world, token=CHARACTERS.index("z"))
    world.settle()
    assert asked.failure is not None
    assert (asked.failure.kind, asked.failure.code) == (FailureKind.REQUEST_FAULT, "invalid_request")
    assert "the grammar cannot go on" in asked.failure.message
    assert asked.output == []


def test_a_grammar_whose_end_would_not_be_an_end_is_refused() -> None:
    world = World()
    asked = _constrained("a", 20)
    asked.sampling = msgspec.structs.replace(asked.sampling, stop_token_ids=())
    open_all(world, asked)
    assert asked.failure is not None
    assert asked.failure.kind is FailureKind.REQUEST_FAULT
    assert "stop_token_ids" in asked.failure.message
    world.settle()


def test_an_unusable_record_costs_one_row_and_no_token() -> None:
    world = World()
    asked = request("a", 20, 5)
    open_all(world, asked)
    world.prefills[0].turn(world.now_s)
    queue = world.wire.queues[world.prefills[0].me.peer_id, world.decodes[0].me.peer_id]
    spoilt = [spoil(message) if isinstance(message, Complete) else message for message in queue]
    assert any(isinstance(message, Complete) for message in spoilt)
    queue.clear()
    queue.extend(spoilt)
    world.settle()
    assert asked.attempt == 1
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    assert world.decodes[0].model.runner.num_tokens == 5, "one row for each token: the first recomputes the last of the prompt"


def test_log_probabilities_come_with_every_token_whoever_drew_it() -> None:
    for is_local in (False, True):
        world = World()
        asked = request("a", 20, 9, is_local=is_local)
        asked.sampling = msgspec.structs.replace(asked.sampling, logprobs=2, prompt_logprobs=1)
        open_all(world, asked)
        world.settle()
        assert asked.output == toy_generate(asked.prompt, asked.sampling)
        assert asked.logprobs == [toy_logprobs(token, 2) for token in asked.output]
        assert asked.prompt_logprobs == [toy_logprobs(token, 1) for token in asked.prompt[1:]]


def test_a_prompt_whose_log_probabilities_were_lost_with_the_record_is_computed_again() -> None:
    world = World()
    asked = request("a", 20, 5)
    asked.sampling = msgspec.structs.replace(asked.sampling, prompt_logprobs=1)
    open_all(world, asked)
    world.prefills[0].turn(world.now_s)
    queue = world.wire.queues[world.prefills[0].me.peer_id, world.decodes[0].me.peer_id]
    spoilt = [spoil(message) if isinstance(message, Complete) else message for message in queue]
    queue.clear()
    queue.extend(spoilt)
    world.settle()
    assert asked.attempt == 2
    assert asked.output == toy_generate(asked.prompt, asked.sampling)
    assert asked.prompt_logprobs == [toy_logprobs(token, 1) for token in asked.prompt[1:]]


class SharedSalt(BenchRequest):
    """A router that does not give a scored prompt a salt of its own."""

    salt = b""  # type: ignore[assignment]


def test_a_scored_prompt_under_a_shared_salt_harms_nobody() -> None:
    world = World()
    open_all(world, first := request("a", 20, 3))
    world.settle()
    scored = msgspec.structs.replace(first.sampling, prompt_logprobs=1)
    handed = SharedSalt(RequestId("handed"), [*first.prompt, 1], scored)
    local = SharedSalt(RequestId("local"), [*first.prompt, 1], scored, is_local=True)
    open_all(world, handed)
    world.settle()
    assert len(handed.prompt_logprobs) == 20, "prefill computes all of it, cached or not"
    open_all(world, local)
    world.settle()
    assert local.failure is not None
    assert local.failure.kind is FailureKind.REQUEST_FAULT


def test_ask_is_answered_from_what_was_emitted_until_the_router_has_it_all() -> None:
    world = World()
    asked = request("a", 5, 6, is_local=True)
    open_all(world, asked)
    decode, router = world.decodes[0], world.router.me.peer_id
    transfer = asked.transfer
    assert transfer is not None
    for _ in range(6):
        decode.turn(world.now_s)
    world.wire.queues.clear()  # every frame is lost
    before = len(world.wire.sent)
    decode.receive(router, Ask(transfer, 2), world.now_s)
    answer = world.wire.sent[before][2]
    assert isinstance(answer, Tokens)
    expected = toy_generate(asked.prompt, asked.sampling)
    assert answer.deltas[0].first_index == 2
    assert list(answer.deltas[0].tokens) == expected[2:]
    assert answer.deltas[0].finish is FinishReason.LENGTH
    world.wire.queues.clear()  # so is this answer: the router asks by itself
    world.settle()
    assert asked.output == expected


def test_ask_about_an_unknown_transfer_is_gone() -> None:
    world = World()
    asked = request("a", 5, 3, is_local=True)
    open_all(world, asked)
    transfer = asked.transfer
    assert transfer is not None
    world.settle()
    before = len(world.wire.sent)
    world.decodes[0].receive(world.router.me.peer_id, Ask(transfer, 0), world.now_s)
    assert isinstance(world.wire.sent[before][2], Gone)


def test_a_gateway_that_dies_takes_its_requests_with_it() -> None:
    world = World()
    open_all(world, request("a", 30, 20), request("b", 5, 20, is_local=True))
    for _ in range(3):
        for worker in world.workers:
            worker.turn(world.now_s)
        world.pass_time(0.01)
    gateway: PeerId = world.router.me.peer_id
    world.decodes[0].receiver.peer_lost(gateway, world.now_s)
    world.prefills[0].sender.peer_lost(gateway, world.now_s)
    assert [worker.num_live for worker in world.workers] == [0, 0]
    for _ in range(10):
        world.pass_time(0.1)
    world.assert_no_leaks()


def test_a_lost_source_fails_what_it_owes_and_leaves_the_rest() -> None:
    world = World(num_prefills=2, seed=1)
    asked = [request(name, 40, 6) for name in ("a", "bb", "ccc")]
    open_all(world, *asked)
    lost = world.prefills[0].me.peer_id
    world.decodes[0].receiver.peer_lost(lost, world.now_s)
    world.settle()
    assert all(each.output == toy_generate(each.prompt, each.sampling) for each in asked)
    assert any(each.attempt > 1 for each in asked)


def test_give_up_all_tells_the_router_to_go_elsewhere() -> None:
    world = World(num_decodes=2)
    asked = [request(name, 20, 10) for name in ("a", "bb", "ccc")]
    open_all(world, *asked)
    world.prefills[0].turn(world.now_s)
    for decode in world.decodes[:1]:
        decode.receiver.start_draining()
        decode.receiver.give_up_all("stopping", world.now_s)
        assert decode.num_live == 0
    world.settle()
    assert all(each.output == toy_generate(each.prompt, each.sampling) for each in asked)


def test_every_seal_is_read_once() -> None:
    world = World(max_step_tokens=16)
    asked = request("a", 60, 2)
    open_all(world, asked)
    world.settle()
    seals = [message for _, _, message in world.wire.sent if isinstance(message, Seal)]
    assert [(seal.start, seal.end) for seal in seals] == [(0, 16), (16, 32), (32, 48), (48, 60)]
    assert world.decodes[0].reads.bytes_read == sum(len(seal.blocks) for seal in seals) * world.decodes[0].model.memory.block_bytes


def test_a_request_whose_deadline_passes_fails_and_leaves_nothing() -> None:
    world = World()
    asked = request("a", 20, 100, is_local=True)
    open_all(world, asked)
    world.decodes[0].turn(world.now_s)
    world.pass_time(1000.0)
    while world.deliver_one():
        pass
    assert asked.failure is not None
    assert asked.failure.code == "deadline_exceeded"
    world.assert_no_leaks()


def test_a_request_that_just_fits_the_pool_is_taken() -> None:
    world = World(decode_blocks=4)
    asked = request("a", 20, 13, is_local=True)  # 33 tokens: the cache of the last one is never stored
    open_all(world, asked)
    world.settle()
    assert asked.attempt == 1
    assert asked.output == toy_generate(asked.prompt, asked.sampling)


def test_an_attempt_that_resumes_is_promised_what_is_left_and_no_more() -> None:
    world = World(decode_blocks=4)
    asked = request("a", 8, 25, is_local=True)
    whole = toy_generate(asked.prompt, asked.sampling)
    asked.output = whole[:16]  # an earlier attempt died here
    open_all(world, asked)
    world.settle()
    assert asked.attempt == 1
    assert asked.output == whole


def test_a_request_from_a_source_that_is_gone_goes_elsewhere_at_once() -> None:
    world = World()
    decode, source = world.decodes[0], world.prefills[0].me.peer_id
    decode.pairs.lost.add(source)  # the router places by what the last PING said
    open_all(world, request("a", 20, 4))
    failures = said_to_router(world, Failed)
    assert [(failure.kind, failure.code) for failure in failures] == [(FailureKind.RETRYABLE_ELSEWHERE, "pair_down")]  # type: ignore[attr-defined]
    assert decode.num_live == 0
    decode.pairs.lost.clear()
    world.settle()


def test_blocks_that_come_free_with_the_last_read_wake_who_waits_for_them() -> None:
    world = World(decode_blocks=5)
    pulled = request("a", 24, 1)
    open_all(world, pulled)
    world.prefills[0].turn(world.now_s)
    to_decode = world.decodes[0].me.peer_id
    while world.deliver_one(lambda _sender, to: to == to_decode):
        pass
    decode = world.decodes[0]
    assert decode.model.pool.audit().holders["handle"] == 3
    world.router.cancel(pulled.request_id)
    while world.deliver_one():
        pass
    assert decode.num_live == 0
    while decode.turn(world.now_s):
        pass
    assert not decode.outside.is_woken, "the loop sleeps"
    world.pass_time(1.0)
    assert decode.model.pool.num_available == 5
    assert decode.outside.is_woken, "a sequence that was short of a block would sleep for ever"
    world.settle()
