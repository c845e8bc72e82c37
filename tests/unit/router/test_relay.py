"""The shell around requests, without sockets: what is posted, logged and told."""

import logging

import pytest

from kv_transfer.errors import Draining, QueueFull, WorkerLost
from kv_transfer.identity import Incarnation, RequestId, WorkerId, pack_tokens
from kv_transfer.messages import (
    Cancel,
    FinishReason,
    Message,
    OpenSink,
    PairState,
    SamplingParameters,
    SinkReady,
    StartSource,
    TokenDelta,
    Tokens,
    WorkerAddress,
    WorkerEntry,
    WorkerLoad,
    WorkerState,
    WorkerTable,
)
from router.config import RouterConfig
from router.generation_request import GenerationRequest
from router.output import Output, Wakeup
from router.policy import WorkerRef
from router.relay import Relay, RelayHooks, RequestRecord

PREFILL, OTHER = WorkerRef(WorkerId("p"), Incarnation(1)), WorkerRef(WorkerId("q"), Incarnation(3))
DECODE = WorkerRef(WorkerId("d"), Incarnation(2))


class Scene:
    """A relay with a hand-turned clock; everything that it posts is kept."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.now_s = 0.0
        self.posted: list[tuple[WorkerRef, Message]] = []
        self.records: list[RequestRecord] = []
        self.gaps: list[tuple[float | None, int]] = []
        hooks = RelayHooks(
            on_placed=lambda _placement: None, on_tokens=lambda gap_s, count: self.gaps.append((gap_s, count)), on_ended=self.records.append
        )
        self.relay = Relay(config or RouterConfig(block_size_tokens=4), post=self.post, hooks=hooks, clock=lambda: self.now_s)

    def post(self, worker: WorkerRef, message: Message) -> bool:
        self.posted.append((worker, message))
        return True

    def up(self, *refs: WorkerRef) -> None:
        pairs = tuple(PairState(ref.worker_id, ref.incarnation, True) for ref in refs if ref != DECODE)
        entries = tuple(
            WorkerEntry(
                WorkerAddress(*ref, "h", 1), "decode" if ref == DECODE else "prefill", WorkerState.SERVING, "f", 1,
                WorkerLoad(blocks_free=100), pairs if ref == DECODE else (),
            )
            for ref in refs
        )  # fmt: skip
        self.relay.on_table(WorkerTable(1, entries))
        for ref in refs:
            self.relay.on_link_up(ref)

    def submit(self, name: str = "r", prompt: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Output:
        self.relay.admit(1)
        request = GenerationRequest(
            request_id=RequestId(name),
            prompt=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParameters(max_tokens=5, seed=1),
        )
        return self.relay.submit(request, Wakeup())

    def last(self, kind: type[Message]) -> Message:
        return [message for _, message in self.posted if isinstance(message, kind)][-1]

    def serve(self, finish: FinishReason | None = FinishReason.STOP) -> None:
        opened = self.last(OpenSink)
        assert isinstance(opened, OpenSink)
        self.relay.on_message(DECODE, SinkReady(opened.transfer, 0, 1))
        self.relay.on_message(DECODE, Tokens((TokenDelta(opened.transfer, opened.first_index, (7, 8), finish),)))


def test_a_request_waits_for_its_workers_and_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    output = scene.submit()
    assert scene.posted == []
    assert scene.relay.count_phases()["waiting"] == 1
    scene.now_s = 2.0
    scene.up(PREFILL, DECODE)
    scene.serve()
    assert output.take() == [7, 8]
    assert output.is_over
    assert [(ref, type(message)) for ref, message in scene.posted] == [
        (DECODE, OpenSink),
        (PREFILL, StartSource),
        (DECODE, Cancel),
        (PREFILL, Cancel),
    ]
    (record,) = scene.records
    assert (record.outcome, record.ttft_s, record.num_output_tokens, record.prefill, record.decode) == ("done", 2.0, 2, "p", "d")
    (line,) = [entry.getMessage() for entry in caplog.records if "request ended" in entry.getMessage()]
    assert "request_id=r outcome=done reason=done ttft_ms=2000" in line
    assert "output_tokens=2 prefill=p decode=d retries=0" in line


def test_a_shared_prefix_goes_where_it_was_until_that_worker_restarts() -> None:
    scene = Scene()
    scene.up(OTHER, PREFILL, DECODE)
    scene.submit("a", (9, 9, 9, 9, 1))
    scene.serve()
    scene.relay.on_link_down(PREFILL)
    scene.submit("b", (5, 5, 5, 5, 1))
    scene.serve()
    scene.relay.on_link_up(PREFILL)
    scene.submit("c", (5, 5, 5, 5, 2))
    scene.serve()
    assert [record.prefill for record in scene.records] == ["p", "q", "q"], "c follows b, although p is first in order"
    again = WorkerRef(OTHER.worker_id, Incarnation(99))
    scene.up(again, PREFILL, DECODE)
    assert (scene.relay.prefix_index.num_keys(OTHER), scene.relay.prefix_index.num_keys(again)) == (0, 0)
    scene.submit("d", (5, 5, 5, 5, 3))
    scene.serve()
    assert scene.records[-1].prefill == "p"


def test_admission_is_bounded() -> None:
    scene = Scene(RouterConfig(max_waiting_requests=2))
    scene.submit("a")
    scene.submit("b")
    with pytest.raises(QueueFull):
        scene.submit("c")


def test_shutdown_ends_what_is_left_with_an_error_that_may_be_retried() -> None:
    scene = Scene()
    scene.up(PREFILL, DECODE)
    output = scene.submit()
    scene.relay.close()
    assert isinstance(output.error, Draining)
    assert isinstance(scene.posted[-1][1], Cancel)
    with pytest.raises(Draining):
        scene.submit("b")


def test_a_request_that_cannot_be_saved_tells_its_client() -> None:
    scene = Scene(RouterConfig(max_attempts=1))
    scene.up(PREFILL, DECODE)
    output = scene.submit()
    scene.relay.on_link_down(DECODE)
    assert isinstance(output.error, WorkerLost)
    assert scene.records[0].reason == "worker_lost"


def test_gaps_between_tokens_are_told() -> None:
    scene = Scene()
    scene.up(PREFILL, DECODE)
    scene.submit()
    scene.serve(finish=None)
    scene.now_s = 0.5
    opened = scene.last(OpenSink)
    assert isinstance(opened, OpenSink)
    scene.relay.on_message(DECODE, Tokens((TokenDelta(opened.transfer, 2, (1, 2, 3), FinishReason.LENGTH),)))
    assert scene.gaps == [(None, 2), (0.5, 3)]


def test_words_about_unknown_requests_are_ignored() -> None:
    scene = Scene()
    scene.up(PREFILL, DECODE)
    scene.submit()
    opened = scene.last(OpenSink)
    assert isinstance(opened, OpenSink)
    scene.relay.abort(RequestId("r"), "client_gone")
    scene.relay.abort(RequestId("r"), "client_gone")
    scene.relay.finish(RequestId("other"), "x")
    scene.relay.on_message(DECODE, SinkReady(opened.transfer, 0, 1))
    scene.relay.on_message(DECODE, Tokens((TokenDelta(opened.transfer, 0, (1,), None),)))
    assert [record.reason for record in scene.records] == ["client_gone"]
