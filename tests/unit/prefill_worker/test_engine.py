"""The prefill engine on the bench: chunks, seals, the prefix cache, and what a launched step protects."""

import msgspec
import pytest

from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import Holder, HolderKind
from kv_transfer.identity import RequestId, pack_tokens
from kv_transfer.messages import Complete, Failed, FailureKind, FinishReason, Progress, SamplingParameters, Seal, StartSource, Taken
from prefill_worker.config import PrefillConfig
from tests.fakes.toy_model import toy_generate
from tests.fakes.worker_bench import BenchRequest, World


def request(name: str, num_tokens: int, max_tokens: int = 3) -> BenchRequest:
    prompt = [(len(name) * 7 + i) % 50 for i in range(num_tokens)]
    return BenchRequest(RequestId(name), prompt, SamplingParameters(max_tokens=max_tokens, seed=1))


def deliver_all(world: World) -> None:
    while world.deliver_one():
        pass


def start(world: World, *requests: BenchRequest) -> None:
    """Bring requests as far as the prefill worker's queue, in this order."""
    for each in requests:
        world.router.submit(each)
        world.router.tick(world.now_s)
        deliver_all(world)


def said(world: World, kind: type) -> list:  # type: ignore[type-arg]
    prefill = world.prefills[0].me.peer_id
    return [message for sender, _, message in world.wire.sent if sender == prefill and isinstance(message, kind)]


def test_each_chunk_is_sealed_after_its_step_and_the_last_completes() -> None:
    world = World(max_step_tokens=16)
    start(world, request("a", 40))
    seals, completes = [], []
    for _ in range(3):
        world.prefills[0].turn(world.now_s)
        seals.append(len(said(world, Seal)))
        completes.append(len(said(world, Complete)))
    assert seals == [1, 2, 3]
    assert completes == [0, 0, 1]
    assert [(seal.chunk, seal.start, seal.end) for seal in said(world, Seal)] == [(0, 0, 16), (1, 16, 32), (2, 32, 40)]
    world.settle()


def test_nothing_is_sealed_before_its_store() -> None:
    world = World()
    start(world, request("a", 20))
    world.prefills[0].launch(world.now_s)
    world.prefills[0].run()
    assert said(world, Seal) == []
    world.prefills[0].land(world.now_s)
    assert len(said(world, Seal)) == 1
    world.settle()


def test_a_cached_prefix_is_sealed_at_once_as_the_first_chunk() -> None:
    world = World(num_decodes=1, max_step_tokens=16)
    first = request("a", 40)
    start(world, first)
    world.settle()
    second = BenchRequest(RequestId("second"), [*first.prompt, 1, 2, 3], first.sampling)
    world.decodes[0].model.pool.allocate(
        40, holder := Holder(HolderKind.REQUEST, "test")
    )  # the decode worker's cache is evicted, the source's is not
    world.decodes[0].model.pool.release_all(holder)
    start(world, second)
    before = len(said(world, Seal))
    world.prefills[0].launch(world.now_s)
    seal = said(world, Seal)[before]
    assert (seal.chunk, seal.start, seal.end) == (0, 0, 40)
    world.settle()
    assert second.num_cached_tokens == 40
    assert second.output == toy_generate(second.prompt, second.sampling)


def test_the_last_token_is_always_computed() -> None:
    world = World()
    first = request("a", 32)
    start(world, first)
    world.settle()
    num_tokens = world.prefills[0].model.runner.num_tokens
    again = BenchRequest(RequestId("again"), first.prompt, first.sampling)
    start(world, again)
    world.settle()
    assert world.prefills[0].model.runner.num_tokens == num_tokens + 8
    assert again.output == first.output


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_prompt_that_ends_at_a_block_s_edge_is_cached_whole(max_drafts: int) -> None:
    """With MTP its last block has its key once the token after it is drawn."""
    world = World(max_drafts=max_drafts)
    first = request("a", 16)
    start(world, first)
    world.settle()
    turn = BenchRequest(RequestId("turn"), [*first.prompt, first.output[0], 7], first.sampling)
    assert candidate_tokens(world, turn) == 16
    other = BenchRequest(RequestId("other"), [*first.prompt, first.output[0] ^ 1, 7], first.sampling)
    assert candidate_tokens(world, other) == (8 if max_drafts else 16)
    world.settle()
    assert turn.output == toy_generate(turn.prompt, turn.sampling)
    assert other.output == toy_generate(other.prompt, other.sampling)


def test_a_prompt_of_one_block_is_cached_whole_under_its_salt() -> None:
    world = World(max_drafts=3)
    first = request("a", 8)
    first.sampling = msgspec.structs.replace(first.sampling, prompt_logprobs=0)
    start(world, first)
    world.settle()
    token = first.output[0]
    pool = world.prefills[0].model.pool
    assert len(pool.lookup(block_keys(pack_tokens([*first.prompt, token]), b"a 1", 8, looks_one_token_ahead=True))) == 1
    assert len(pool.lookup(block_keys(pack_tokens([*first.prompt, token]), b"", 8, looks_one_token_ahead=True))) == 0


def candidate_tokens(world: World, waiting: BenchRequest) -> int:
    """Tokens of a prompt that prefill has in its cache when it arrives; decode's cache is evicted."""
    pool = world.decodes[0].model.pool
    pool.allocate(pool.num_available, holder := Holder(HolderKind.REQUEST, "test"))
    pool.release_all(holder)
    start(world, waiting)
    world.prefills[0].sequences.queue_arrived()
    return world.prefills[0].sequences.candidates(9)[-1].num_cached_tokens


def test_a_record_says_when_its_token_ends_the_request() -> None:
    world = World()
    start(world, request("a", 9, max_tokens=1))
    world.prefills[0].turn(world.now_s)
    record = said(world, Complete)[0].record
    assert record.finish is FinishReason.LENGTH
    assert record.first_index == 0
    world.settle()


def test_cancelled_in_a_step_its_blocks_are_kept_until_the_step_returns_and_cached_then() -> None:
    world = World(prefill_blocks=6, max_step_tokens=64)
    asked = request("a", 40)
    start(world, asked)
    prefill = world.prefills[0]
    prefill.launch(world.now_s)
    world.router.cancel(asked.request_id)
    deliver_all(world)
    assert prefill.num_live == 0
    assert prefill.model.pool.num_available == 1
    prefill.land(world.now_s)
    assert prefill.model.pool.num_available == 6
    assert prefill.model.pool.num_cached == 5, "what the step has computed is good"
    world.settle()


def test_a_prompt_waits_for_blocks_and_is_never_half_admitted() -> None:
    world = World(prefill_blocks=10, max_step_tokens=16)
    first, second = request("a", 60), request("bb", 50)
    start(world, first, second)
    prefill = world.prefills[0]
    prefill.turn(world.now_s)
    assert prefill.sequences.num_computing == 1
    assert prefill.model.pool.held_by(compute_holder(second)) == ()
    world.settle()
    assert [each.output for each in (first, second)] == [toy_generate(each.prompt, each.sampling) for each in (first, second)]


def compute_holder(asked: BenchRequest) -> Holder:
    return Holder(HolderKind.COMPUTE, asked.transfer)


def test_what_superseded_attempts_have_sealed_cannot_block_the_queue() -> None:
    """Two later attempts wait, each holding blocks of its earlier one (as the session does), and neither fits beside the other's."""
    world = World(prefill_blocks=10)
    waiting = [request("a", 64), request("bb", 64)]
    start(world, *waiting)
    prefill = world.prefills[0]
    for number, asked in enumerate(waiting):
        for index, block_id in enumerate(prefill.model.pool.allocate(4, compute_holder(asked))):
            prefill.model.pool.publish(block_id, bytes([number, index]))
    assert prefill.launch(world.now_s)
    world.settle()
    assert [each.output for each in waiting] == [toy_generate(each.prompt, each.sampling) for each in waiting]


def test_progress_is_said_while_a_step_takes_long() -> None:
    world = World()
    start(world, request("a", 20), request("bb", 20))
    world.prefills[0].launch(world.now_s)
    before = len(said(world, Progress))
    for _ in range(30):
        world.pass_time(0.1)
    progress = said(world, Progress)[before:]
    per_receiver = 2
    assert len(progress) >= 2 * 2 * per_receiver
    world.settle()


def test_a_full_queue_sends_requests_elsewhere() -> None:
    world = World(prefill_config=PrefillConfig(max_waiting=1, max_computing=1))
    start(world, request("a", 20), request("bb", 20))
    failures = said(world, Failed)
    assert failures
    assert {failure.kind for failure in failures} == {FailureKind.RETRYABLE_ELSEWHERE}
    assert {failure.code for failure in failures} == {"queue_full"}
    world.settle()


def test_a_prompt_that_no_pool_of_this_size_can_hold_is_the_request_s_fault() -> None:
    world = World(prefill_blocks=4, decode_blocks=40)
    asked = request("a", 60)
    start(world, asked)
    assert asked.failure is not None
    assert asked.failure.kind is FailureKind.REQUEST_FAULT
    assert asked.failure.code == "context_length_exceeded"
    world.settle()


@pytest.mark.parametrize("need_from", [-8, 4, 24, 800])
def test_a_need_that_is_no_block_edge_of_the_prompt_is_refused(need_from: int) -> None:
    world = World()
    asked = request("a", 24)
    start(world, asked)
    message = next(m for _, _, m in world.wire.sent if isinstance(m, StartSource))
    spoilt = msgspec.structs.replace(message, need_from=need_from, transfer=msgspec.structs.replace(message.transfer, attempt=7))
    world.prefills[0].receive(world.router.me.peer_id, spoilt, world.now_s)
    failures = [failure for failure in said(world, Failed) if failure.transfer.attempt == 7]
    assert {failure.kind for failure in failures} == {FailureKind.REQUEST_FAULT}


def test_an_urgent_request_overtakes_within_the_bound() -> None:
    world = World(prefill_config=PrefillConfig(max_computing=1, priority_weight_s=5.0))
    first, late = request("a", 20), request("bb", 20)
    start(world, first, late)
    message = next(m for _, _, m in world.wire.sent if isinstance(m, StartSource))
    urgent = msgspec.structs.replace(
        message, priority=-1, transfer=msgspec.structs.replace(message.transfer, request_id=RequestId("urgent"), attempt=1)
    )
    world.prefills[0].receive(world.router.me.peer_id, urgent, world.now_s + 3.0)
    world.prefills[0].engine.take_commands(world.now_s)
    assert [sequence.transfer.request_id for sequence in world.prefills[0].sequences.waiting] == ["urgent", "a", "bb"]


def test_giving_up_also_ends_what_is_sealed_and_not_taken() -> None:
    world = World(num_prefills=2, seed=1)
    asked = [request("a" * (1 + i), 20) for i in range(4)]
    start(world, *asked)
    prefill = world.prefills[0]
    while prefill.turn(world.now_s):
        pass
    assert prefill.sequences.num_computing == prefill.sequences.num_waiting == 0
    assert prefill.num_live > 0
    prefill.sender.start_draining()
    prefill.sender.give_up_all("stopping", world.now_s)
    assert prefill.num_live == 0
    world.settle()
    assert [each.output for each in asked] == [toy_generate(each.prompt, each.sampling) for each in asked]


def test_blocks_that_decode_has_taken_wake_who_waits_for_them() -> None:
    world = World(max_step_tokens=16)
    first = request("a", 40)
    start(world, first)
    prefill = world.prefills[0]
    for _ in range(3):
        prefill.turn(world.now_s)
    while prefill.turn(world.now_s):
        pass
    assert not prefill.outside.is_woken, "the loop sleeps"
    assert first.transfer is not None
    prefill.receive(world.decodes[0].me.peer_id, Taken(first.transfer, (0,), False), world.now_s)
    assert prefill.outside.is_woken, "a prompt that was short of these blocks would sleep on"
    world.settle()
