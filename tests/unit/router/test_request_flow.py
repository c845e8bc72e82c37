"""One request's attempts, fencing, time-outs and retries, in virtual time."""

import msgspec
import pytest

from kv_transfer.errors import DeadlineExceeded, EngineFault, InvalidRequest, NoCapacity, PromptTooLong, WorkerLost
from kv_transfer.identity import Incarnation, PackedTokens, RequestId, TransferId, WorkerId, pack_tokens, unpack_tokens
from kv_transfer.messages import (
    Ask,
    Closed,
    Failed,
    FailureKind,
    FinishReason,
    Gone,
    Message,
    OpenSink,
    Progress,
    SamplingParameters,
    SinkBusy,
    SinkReady,
    StartSource,
    TokenDelta,
    TokenLogprobs,
    WorkerAddress,
)
from router.config import RouterConfig
from router.effects import Deliver, Ended, FlowEffect, Leave, Post, PrefillDone, SinkHadRoom, SinkWasBusy
from router.generation_request import GenerationRequest
from router.lifecycle import RequestState
from router.policy import Placement, WorkerRef
from router.request_flow import AttemptPhase, RequestFlow

CONFIG = RouterConfig(max_attempts=3, request_deadline_s=100.0, worker_wait_s=30.0)
PREFILL, DECODE = WorkerRef(WorkerId("p"), Incarnation(11)), WorkerRef(WorkerId("d"), Incarnation(22))
PREFILL_AT, DECODE_AT = WorkerAddress(*PREFILL, "host", 1), WorkerAddress(*DECODE, "host", 2)
PAIR = Placement(decode=DECODE, prefill=PREFILL, prefill_tokens=3, decode_tokens=3)
LOCAL = Placement(decode=DECODE, prefill=None, prefill_tokens=0, decode_tokens=3)


def make_flow(config: RouterConfig = CONFIG) -> RequestFlow:
    request = GenerationRequest(
        request_id=RequestId("r"), prompt=pack_tokens([1, 2, 3]), num_prompt_tokens=3, sampling=SamplingParameters(max_tokens=10, seed=5)
    )
    return RequestFlow(request, config, 0.0)


def posts(effects: list[FlowEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Post)]


def delivered(effects: list[FlowEffect]) -> list[int]:
    return [token for effect in effects if isinstance(effect, Deliver) for token in effect.tokens]


def ended(effects: list[FlowEffect]) -> Ended:
    (end,) = [effect for effect in effects if isinstance(effect, Ended)]
    return end


def left(effects: list[FlowEffect]) -> Leave:
    (leave,) = [effect for effect in effects if isinstance(effect, Leave)]
    return leave


def transfer(attempt: int = 1, source: int = 11) -> TransferId:
    return TransferId(RequestId("r"), attempt, Incarnation(source), Incarnation(22))


def place(flow: RequestFlow, now_s: float = 0.0) -> OpenSink:
    (message,) = posts(flow.place(PAIR, DECODE_AT, PREFILL_AT, now_s))
    assert isinstance(message, OpenSink)
    return message


def start(flow: RequestFlow, now_s: float = 0.0) -> StartSource:
    effects = flow.receive(DECODE, SinkReady(transfer(flow.attempt), 2, 5), now_s)
    assert SinkHadRoom(DECODE) in effects
    (message,) = posts(effects)
    assert isinstance(message, StartSource)
    return message


def stream(
    flow: RequestFlow, first_index: int, tokens: tuple[int, ...], now_s: float = 0.0, finish: FinishReason | None = None
) -> list[FlowEffect]:
    return flow.receive_tokens(DECODE, TokenDelta(transfer(flow.attempt), first_index, tokens, finish, 2), now_s)


def test_a_calm_life() -> None:
    flow = make_flow()
    assert flow.wants_pair(0.0)
    opened = place(flow)
    assert (opened.transfer, opened.first_index, unpack_tokens(opened.tokens), opened.source) == (transfer(), 0, [1, 2, 3], PREFILL_AT)
    assert not flow.wants_pair(0.0)
    started = start(flow)
    assert (started.need_from, started.sink, started.transfer) == (2, DECODE_AT, transfer())
    assert flow.receive(PREFILL, Progress(transfer(), "computing", 3, 0, 0), 0.1) == []
    assert flow.phase is AttemptPhase.PREFILLING
    effects = stream(flow, 0, (7, 8), 0.2)
    assert PrefillDone(PAIR) in effects
    assert delivered(effects) == [7, 8]
    assert flow.state is RequestState.STREAMING
    assert (flow.first_token_s, flow.num_cached_tokens) == (0.2, 2)
    effects = stream(flow, 2, (9,), 0.3, FinishReason.STOP)
    assert delivered(effects) == [9]
    assert left(effects) == Leave(transfer(), PAIR, (DECODE, PREFILL), False, "done")
    assert ended(effects) == Ended(RequestState.DONE, "done", None)
    assert flow.tick(1e6) == flow.abort("late") == flow.finish("late") == []


def test_log_probabilities_stay_with_their_tokens_when_a_delta_overlaps() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    told = tuple(TokenLogprobs(-float(number), 1) for number in range(3))
    stream(flow, 0, (7,))
    delta = TokenDelta(transfer(), 0, (7, 8, 9), None, 2, 0, told, told[:2])
    (effect,) = flow.receive_tokens(DECODE, delta, 0.0)
    assert isinstance(effect, Deliver)
    assert (list(effect.tokens), list(effect.logprobs)) == ([8, 9], list(told[1:]))


def test_a_prompt_is_scored_under_a_salt_of_its_own_until_its_first_token_has_come() -> None:
    flow = make_flow()
    flow.request = msgspec.structs.replace(
        flow.request, sampling=msgspec.structs.replace(flow.request.sampling, prompt_logprobs=2), cache_salt=b"s"
    )
    first = place(flow)
    assert first.cache_salt.startswith(b"s\0score")
    assert start(flow).cache_salt == first.cache_salt
    flow.worker_lost(DECODE, 0.0)
    second = place(flow, flow.not_before_s)
    assert second.sampling.prompt_logprobs == 2
    assert second.cache_salt not in (first.cache_salt, b"s"), "what the first attempt has cached has no logits either"
    stream(flow, 0, (7,), flow.not_before_s)
    flow.worker_lost(DECODE, flow.not_before_s)
    third = place(flow, flow.not_before_s)
    assert (third.sampling.prompt_logprobs, third.cache_salt, third.first_index) == (-1, b"s", 1)


def test_decode_alone_needs_no_start() -> None:
    flow = make_flow()
    (opened,) = posts(flow.place(LOCAL, DECODE_AT, None, 0.0))
    assert isinstance(opened, OpenSink)
    assert (opened.source, opened.transfer.source_incarnation) == (None, 0)
    assert posts(flow.receive(DECODE, SinkReady(transfer(source=0), 0, 5), 0.0)) == []
    effects = flow.receive_tokens(DECODE, TokenDelta(transfer(source=0), 0, (7,), FinishReason.LENGTH), 0.0)
    assert left(effects).workers == (DECODE,)


def test_each_index_is_emitted_once_whatever_is_repeated_or_lost() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    assert delivered(stream(flow, 0, (7, 8))) == [7, 8]
    assert delivered(stream(flow, 0, (7, 8))) == []
    assert delivered(stream(flow, 1, (8, 9))) == [9]
    assert delivered(stream(flow, 5, (1,), now_s=0.5)) == [], "a gap is not jumped over"
    assert posts(stream(flow, 6, (2,), now_s=2.0)) == [Ask(transfer(), 3)]
    assert posts(stream(flow, 7, (2,), now_s=2.1)) == [], "asked once in a while"
    assert delivered(stream(flow, 3, (1, 2, 3))) == [1, 2, 3]
    assert list(flow.output) == [7, 8, 9, 1, 2, 3]


def test_a_finish_that_comes_again_without_tokens_is_taken() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    stream(flow, 0, (7,))
    effects = stream(flow, 1, (), finish=FinishReason.LENGTH)
    assert [effect.finish for effect in effects if isinstance(effect, Deliver)] == [FinishReason.LENGTH]
    assert ended(effects).state is RequestState.DONE


def test_the_next_attempt_carries_what_was_emitted_and_old_tokens_are_fenced() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    stream(flow, 0, (7, 8), 1.0)
    leave = left(flow.worker_lost(DECODE, 2.0))
    assert (leave.reason, leave.workers) == ("retry", (DECODE, PREFILL))
    assert flow.state is RequestState.DISPATCHED
    opened = place(flow, 2.0)
    assert (opened.transfer.attempt, opened.first_index, unpack_tokens(opened.tokens)) == (2, 2, [1, 2, 3, 7, 8])
    assert opened.num_prompt_tokens == 3
    assert opened.deadline_s == pytest.approx(98.0)
    late = TokenDelta(transfer(1), 2, (9,))
    assert flow.receive_tokens(DECODE, late, 2.1) == []
    assert flow.receive(DECODE, SinkReady(transfer(1), 0, 0), 2.1) == []
    start(flow, 2.1)
    assert delivered(stream(flow, 2, (4,), 2.2)) == [4]
    assert list(flow.output) == [7, 8, 4]
    assert flow.first_token_s == 1.0


def test_tokens_from_another_worker_are_not_taken() -> None:
    flow = make_flow()
    place(flow)
    assert flow.receive_tokens(PREFILL, TokenDelta(transfer(), 0, (7,)), 0.0) == []


def test_before_prefill_was_told_only_decode_is_cancelled() -> None:
    flow = make_flow()
    place(flow)
    effects = flow.abort("client_gone")
    assert left(effects) == Leave(transfer(), PAIR, (DECODE,), True, "client_gone")
    assert ended(effects) == Ended(RequestState.FAILED, "client_gone", None)


def test_busy_is_no_failure_and_the_room_is_marked_after_the_attempt_was_left() -> None:
    flow = make_flow()
    for _ in range(20):
        place(flow)
        effects = flow.receive(DECODE, SinkBusy(transfer(flow.attempt), 0.5), 1.0)
        assert [type(effect) for effect in effects] == [Leave, SinkWasBusy]
        assert effects[-1] == SinkWasBusy(DECODE, 1.5)
    assert flow.num_failures == 0
    assert flow.wants_pair(1.0)


@pytest.mark.parametrize("code", ["queue_full", "draining"])
def test_a_full_worker_is_no_failure_but_is_tried_ever_more_slowly(code: str) -> None:
    flow = make_flow()
    delays = []
    for number in range(12):
        now_s = float(number * 5)
        place(flow, now_s)
        start(flow, now_s)
        flow.receive(PREFILL, Failed(transfer(flow.attempt), FailureKind.RETRYABLE_ELSEWHERE, code, ""), now_s)
        delays.append(flow.not_before_s - now_s)
    assert delays == sorted(delays)
    assert delays[0] > 0
    assert delays[-1] == CONFIG.max_retry_backoff_s
    assert (flow.num_failures, flow.demand().avoid) == (0, {PREFILL})


def test_attempts_are_counted_and_the_last_failure_is_told() -> None:
    flow = make_flow()
    effects: list[FlowEffect] = []
    for _ in range(CONFIG.max_attempts):
        place(flow)
        effects = flow.receive(DECODE, Failed(transfer(flow.attempt), FailureKind.RETRYABLE_ELSEWHERE, "x", "internal words"), 0.0)
    end = ended(effects)
    assert end.state is RequestState.FAILED
    assert isinstance(end.error, WorkerLost)
    assert "internal words" not in end.error.message


@pytest.mark.parametrize(
    ("code", "expected"), [("context_length_exceeded", PromptTooLong), ("invalid_request", InvalidRequest), ("other", InvalidRequest)]
)
def test_a_request_fault_is_never_retried_and_its_words_are_told(code: str, expected: type[InvalidRequest]) -> None:
    flow = make_flow()
    place(flow)
    end = ended(flow.receive(DECODE, Failed(transfer(), FailureKind.REQUEST_FAULT, code, "too long by 3"), 0.0))
    assert type(end.error) is expected
    assert end.error.message == "too long by 3"


def test_a_fatal_failure_is_not_retried() -> None:
    flow = make_flow()
    place(flow)
    assert isinstance(ended(flow.receive(DECODE, Failed(transfer(), FailureKind.FATAL, "x", "y"), 0.0)).error, EngineFault)
    flow = make_flow()
    place(flow)
    fatal = Failed(transfer(), FailureKind.FATAL, "deadline_exceeded", "y")
    assert isinstance(ended(flow.receive(DECODE, fatal, 0.0)).error, DeadlineExceeded)


def test_an_unanswered_open_is_said_again_with_the_same_id_and_then_left() -> None:
    flow = make_flow()
    opened = place(flow)
    assert posts(flow.tick(0.5)) == []
    assert posts(flow.tick(1.0)) == [opened]
    assert posts(flow.tick(1.5)) == []
    assert posts(flow.tick(2.0)) == [opened]
    assert left(flow.tick(3.0)).reason == "retry"
    assert DECODE in flow.demand().avoid


def test_an_unanswered_start_is_said_again_and_then_left() -> None:
    flow = make_flow()
    place(flow)
    started = start(flow)
    assert posts(flow.tick(1.0)) == posts(flow.tick(2.0)) == [started]
    assert left(flow.tick(3.0)).workers == (DECODE, PREFILL)
    assert PREFILL in flow.demand().avoid


def test_a_queue_may_be_as_long_as_it_likes_but_silence_is_not_a_queue() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    for second in range(60):
        assert flow.receive(PREFILL, Progress(transfer(), "queued", 0, 9, 0), float(second)) == []
        assert flow.tick(float(second)) == []
    assert flow.tick(68.9) == []
    assert left(flow.tick(69.0)).reason == "retry"


def test_a_silent_decode_worker_is_asked_and_then_left() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    flow.receive(PREFILL, Progress(transfer(), "complete", 3, 0, 1), 1.0)
    assert flow.phase is AttemptPhase.DECODING
    assert posts(flow.tick(2.9)) == []
    assert posts(flow.tick(3.0)) == [Ask(transfer(), 0)]
    assert posts(flow.tick(3.5)) == []
    assert flow.receive(PREFILL, Progress(transfer(), "complete", 3, 0, 1), 4.0) == [], "prefill's life says nothing about decode's"
    assert posts(flow.tick(5.0)) == [Ask(transfer(), 0)]
    assert stream(flow, 0, (), 6.0) == [], "an empty answer is a sign of life"
    assert flow.tick(7.9) == []
    assert posts(flow.tick(8.0)) == [Ask(transfer(), 0)]
    assert left(flow.tick(16.0)).reason == "retry"


@pytest.mark.parametrize("answer", [Gone(transfer(), "ask"), Closed(transfer(), "gone")])
def test_decode_that_no_longer_knows_the_request_has_lost_it(answer: Message) -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    stream(flow, 0, (7,))
    assert left(flow.receive(DECODE, answer, 1.0)).reason == "retry"


def test_prefill_that_goes_after_its_work_is_not_missed() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    flow.receive(PREFILL, Progress(transfer(), "sealed", 3, 0, 1), 0.0)
    assert flow.receive(PREFILL, Closed(transfer(), "taken"), 0.0) == []
    assert flow.phase is AttemptPhase.DECODING
    assert flow.worker_lost(PREFILL, 0.1) == []
    assert flow.receive(PREFILL, Gone(transfer(), "x"), 0.1) == []


@pytest.mark.parametrize("phase", ["opening", "starting", "prefilling"])
def test_prefill_that_goes_before_its_work_is_done_ends_the_attempt(phase: str) -> None:
    flow = make_flow()
    place(flow)
    if phase != "opening":
        start(flow)
    if phase == "prefilling":
        flow.receive(PREFILL, Progress(transfer(), "computing", 1, 0, 0), 0.0)
    assert flow.phase.value == phase
    assert left(flow.worker_lost(PREFILL, 0.0)).reason == "retry"


def test_prefill_that_knows_nothing_of_a_start_has_lost_it() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    assert left(flow.receive(PREFILL, Gone(transfer(), "startsource"), 0.0)).owes_prefill


def test_waiting_for_a_first_worker_ends_with_503_and_for_a_restarted_one_with_the_deadline() -> None:
    flow = make_flow()
    assert flow.tick(29.9) == []
    assert isinstance(ended(flow.tick(30.0)).error, NoCapacity)
    flow = make_flow()
    place(flow)
    flow.worker_lost(DECODE, 1.0)
    assert flow.tick(99.9) == []
    assert isinstance(ended(flow.tick(100.0)).error, DeadlineExceeded)


def test_the_client_may_have_enough_in_any_state() -> None:
    flow = make_flow()
    place(flow)
    start(flow)
    stream(flow, 0, (7,))
    flow.worker_lost(DECODE, 1.0)
    effects = flow.finish("stop_string")
    assert ended(effects) == Ended(RequestState.DONE, "stop_string", None)
    assert len(effects) == 1, "no attempt is under way"


def test_sampling_is_the_same_in_every_attempt() -> None:
    flow = make_flow()
    first = place(flow)
    flow.worker_lost(DECODE, 1.0)
    second = place(flow, 1.0)
    same = msgspec.structs.replace(second, transfer=first.transfer, deadline_s=first.deadline_s)
    assert same == first
    assert first.tokens == PackedTokens(pack_tokens([1, 2, 3]))
