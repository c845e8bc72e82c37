"""One request, from the moment it enters until its one terminal state: attempts, fencing, time-outs, retries.

Sans I/O: events and the time come in, effects go out (`relay.py` carries them out). Knows: which message means what in which phase.
Does not know sockets, other requests, or text.

An attempt goes to exactly one pair of workers. Its phases, by who owns the next step:

    OPENING (decode: SINK_READY) -> STARTING (prefill: first PROGRESS) -> PREFILLING (prefill) -> DECODING (decode: TOKENS)
"""

from array import array
from collections.abc import Sequence
from enum import Enum, unique

import msgspec

from kv_transfer.errors import (
    DeadlineExceeded,
    Draining,
    EngineFault,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    ServingError,
    TransferTimeout,
    WorkerLost,
)
from kv_transfer.handoff import advance
from kv_transfer.identity import Incarnation, TransferId
from kv_transfer.messages import (
    Ask,
    Closed,
    Failed,
    FailureKind,
    Gone,
    Message,
    OpenSink,
    Progress,
    SinkBusy,
    SinkReady,
    StartSource,
    TokenDelta,
    WorkerAddress,
)
from router.admission import find_wait_refusal, may_retry, retry_delay_s
from router.config import RouterConfig
from router.effects import Deliver, Ended, FlowEffect, Leave, Post, PrefillDone, SinkHadRoom, SinkWasBusy
from router.generation_request import GenerationRequest, open_message, start_message
from router.lifecycle import REQUEST_TRANSITIONS, TERMINAL_STATES, RequestEvent, RequestState
from router.policy import Demand, Placement, WorkerRef

SOURCE_IS_FINISHED = frozenset({"complete", "released"})
"""States in PROGRESS (`kv_transfer.handoff.SourceState`) after which decode owns the next step."""

REQUEST_FAULTS: dict[str, type[InvalidRequest]] = {PromptTooLong.code: PromptTooLong}
"""Faults of the caller that only a worker could find, by the code that it sends."""

PUT_OFF_CODES = frozenset({Draining.code, QueueFull.code})
"""Failures that say nothing against the request or the worker."""


@unique
class AttemptPhase(Enum):
    """How far the current attempt is; NONE waits for a pair."""

    NONE = "none"
    OPENING = "opening"
    STARTING = "starting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class RequestFlow:
    """One request. Methods return effects in the order in which they must be carried out."""

    def __init__(self, request: GenerationRequest, config: RouterConfig, now_s: float) -> None:
        self.request = request
        self.state = advance(REQUEST_TRANSITIONS, RequestState.NEW, RequestEvent.ADMIT)
        self.phase = AttemptPhase.NONE
        self.attempt = 0
        self.num_failures = 0
        self.num_delays = 0
        self.placement: Placement | None = None
        self.last_placement: Placement | None = None
        self.output = array("i")
        self.num_cached_tokens = 0
        self.entered_s = now_s
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.not_before_s = now_s
        self._config = config
        self._deadline_s = now_s + config.request_deadline_s
        self._avoid: set[WorkerRef] = set()
        self._transfer: TransferId | None = None
        self._opened: OpenSink | None = None
        self._started: StartSource | None = None
        self._is_source_told = False
        self._owes_prefill = False
        self._said_s = now_s
        self._num_tries = 0
        self._heard_s = now_s

    # -- placement -----------------------------------------------------------------------------------------------------

    def wants_pair(self, now_s: float) -> bool:
        """Whether an attempt may begin now."""
        return self.phase is AttemptPhase.NONE and self.state not in TERMINAL_STATES and now_s >= self.not_before_s

    def demand(self) -> Demand:
        """What the policy must find room for."""
        return Demand(
            num_tokens=self.request.num_prompt_tokens + len(self.output),
            num_more_tokens=max(self.request.sampling.max_tokens - len(self.output), 0),
            avoid=self._avoid,
        )

    def place(self, placement: Placement, decode: WorkerAddress, prefill: WorkerAddress | None, now_s: float) -> list[FlowEffect]:
        """Begin an attempt with this pair."""
        assert self.phase is AttemptPhase.NONE, "an attempt is under way"
        # The number is raised before the snapshot of emitted tokens is taken: from here on nothing that an earlier attempt says
        # can append to them, so first_index of the new one is right.
        self.attempt += 1
        transfer = TransferId(
            request_id=self.request.request_id,
            attempt=self.attempt,
            source_incarnation=prefill.incarnation if prefill is not None else Incarnation(0),
            sink_incarnation=decode.incarnation,
        )
        self.state = advance(REQUEST_TRANSITIONS, self.state, RequestEvent.DISPATCH)
        self._transfer = transfer
        self.placement = self.last_placement = placement
        self._is_source_told = False
        self._owes_prefill = prefill is not None
        self._opened = open_message(self.request, transfer, self.output, self._deadline_s - now_s, prefill)
        self._started = None if prefill is None else start_message(self._opened, decode)
        return self._say(AttemptPhase.OPENING, placement.decode, self._opened, now_s)

    def _say(self, phase: AttemptPhase, worker: WorkerRef, message: Message, now_s: float) -> list[FlowEffect]:
        """Enter a phase whose first step is the answer to `message`."""
        self.phase = phase
        self._said_s = self._heard_s = now_s
        self._num_tries = 1
        return [Post(worker, message)]

    # -- what workers say ----------------------------------------------------------------------------------------------

    def receive(self, worker: WorkerRef, message: Message, now_s: float) -> list[FlowEffect]:
        """A message about this request. Anything that is not about the current attempt changes nothing."""
        placement = self.placement
        if placement is None or getattr(message, "transfer", None) != self._transfer:
            return []
        if worker == placement.decode:
            return self._receive_decode(placement, message, now_s)
        if worker == placement.prefill:
            return self._receive_prefill(message, now_s)
        return []

    def receive_tokens(self, worker: WorkerRef, delta: TokenDelta, now_s: float) -> list[FlowEffect]:
        """Tokens of the current attempt, taken from the next index on: each index is emitted once, whatever the attempt."""
        placement = self.placement
        if placement is None or delta.transfer != self._transfer or worker != placement.decode:
            return []
        self._heard_s = now_s
        num_known = len(self.output) - delta.first_index
        if num_known < 0:
            return self._ask_for_gap(placement, now_s)
        if num_known > len(delta.tokens):
            return []
        if self.phase is not AttemptPhase.DECODING:
            self.phase = AttemptPhase.DECODING
            self._said_s = now_s
        tokens = delta.tokens[num_known:]
        effects: list[FlowEffect] = []
        if tokens:
            effects += self._take(placement, tokens, delta, now_s)
        if delta.finish is not None:
            effects += [Deliver((), delta.finish)] if not tokens else []
            effects += self._end(RequestEvent.FINISH, "done", None)
        return effects

    def _ask_for_gap(self, placement: Placement, now_s: float) -> list[FlowEffect]:
        """Tokens were lost with a connection: nothing at or after the gap may be taken before decode has said it again."""
        if self._transfer is None or now_s - self._said_s < self._config.control_rpc_s:
            return []
        self._said_s = now_s
        return [Post(placement.decode, Ask(self._transfer, len(self.output)))]

    def _take(self, placement: Placement, tokens: Sequence[int], delta: TokenDelta, now_s: float) -> list[FlowEffect]:
        effects: list[FlowEffect] = []
        if self.state is RequestState.DISPATCHED:
            self.state = advance(REQUEST_TRANSITIONS, self.state, RequestEvent.TOKENS)
            self._owes_prefill = False
            effects.append(PrefillDone(placement))
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.num_cached_tokens = min(delta.num_cached_tokens, self.request.num_prompt_tokens)
        self.last_token_s = now_s
        self.output.extend(tokens)
        logprobs = delta.logprobs[len(delta.tokens) - len(tokens) :]
        effects.append(Deliver(tokens, delta.finish, logprobs, delta.prompt_logprobs))
        return effects

    def _receive_decode(self, placement: Placement, message: Message, now_s: float) -> list[FlowEffect]:
        self._heard_s = now_s if self.phase is AttemptPhase.DECODING else self._heard_s
        match message:
            case SinkReady() if self.phase is AttemptPhase.OPENING:
                return [SinkHadRoom(placement.decode), *self._start_source(placement, message, now_s)]
            case SinkBusy() if self.phase is AttemptPhase.OPENING:
                until_s = now_s + message.retry_after_s
                return [*self._leave("busy"), SinkWasBusy(placement.decode, until_s)]  # leaving says that there is room: busy is later
            case Failed():
                return self._receive_failure(message, placement.decode, now_s)
            case Gone() | Closed():
                return self._lose(placement.decode, WorkerLost("the decode worker no longer knows the request"), now_s)
        return []

    def _start_source(self, placement: Placement, ready: SinkReady, now_s: float) -> list[FlowEffect]:
        if placement.prefill is None or self._started is None:
            self.phase = AttemptPhase.DECODING
            self._said_s = self._heard_s = now_s
            return []
        self._is_source_told = True
        self._started = msgspec.structs.replace(self._started, need_from=ready.have_tokens, deadline_s=self._deadline_s - now_s)
        return self._say(AttemptPhase.STARTING, placement.prefill, self._started, now_s)

    def _receive_prefill(self, message: Message, now_s: float) -> list[FlowEffect]:
        placement = self.placement
        if placement is None or placement.prefill is None or self.phase not in (AttemptPhase.STARTING, AttemptPhase.PREFILLING):
            return []  # decode owns the next step and tells what it misses
        self._heard_s = now_s
        match message:
            case Progress():
                is_finished = message.state in SOURCE_IS_FINISHED
                self.phase = AttemptPhase.DECODING if is_finished else AttemptPhase.PREFILLING
                self._said_s = now_s
            case Closed():
                self.phase = AttemptPhase.DECODING  # decode has taken everything, or says what went wrong
                self._said_s = now_s
            case Failed():
                return self._receive_failure(message, placement.prefill, now_s)
            case Gone():
                return self._lose(placement.prefill, WorkerLost("the prefill worker no longer knows the request"), now_s)
        return []

    def _receive_failure(self, message: Failed, worker: WorkerRef, now_s: float) -> list[FlowEffect]:
        match message.kind:
            case FailureKind.REQUEST_FAULT:
                fault = REQUEST_FAULTS.get(message.code, InvalidRequest)
                return self._end(RequestEvent.FAIL, "request_fault", fault(message.message))
            case FailureKind.FATAL if message.code == DeadlineExceeded.code:
                return self._expire()
            case FailureKind.FATAL:
                error = EngineFault("a worker could not run the request", worker_code=message.code)
                return self._end(RequestEvent.FAIL, "fatal", error)
            case FailureKind.RETRYABLE_ELSEWHERE if message.code not in PUT_OFF_CODES:
                return self._lose(worker, WorkerLost("a worker failed the request", worker_code=message.code), now_s)
            case _:
                return self._put_off(worker, now_s)

    def worker_lost(self, worker: WorkerRef, now_s: float) -> list[FlowEffect]:
        """Its connection ended, or it came back as another incarnation."""
        placement = self.placement
        if placement is None:
            return []
        needs_prefill = self.phase in (AttemptPhase.OPENING, AttemptPhase.STARTING, AttemptPhase.PREFILLING)
        if worker == placement.decode or (worker == placement.prefill and needs_prefill):
            return self._lose(worker, WorkerLost("the worker that ran the request is gone"), now_s)
        return []

    # -- the client, and time ------------------------------------------------------------------------------------------

    def finish(self, reason: str) -> list[FlowEffect]:
        """The client has what it wanted (a stop string): every token so far is the answer."""
        return [] if self.state in TERMINAL_STATES else self._end(RequestEvent.FINISH, reason, None)

    def abort(self, reason: str) -> list[FlowEffect]:
        """The client is gone."""
        return [] if self.state in TERMINAL_STATES else self._end(RequestEvent.ABORT, reason, None)

    def fail(self, error: ServingError) -> list[FlowEffect]:
        """The gateway cannot go on with it."""
        return [] if self.state in TERMINAL_STATES else self._end(RequestEvent.FAIL, error.code, error)

    def tick(self, now_s: float) -> list[FlowEffect]:
        """Look at the timers. Each measures the party that owns the next step, from when it owned it."""
        if self.state in TERMINAL_STATES:
            return []
        if now_s >= self._deadline_s:
            return self._expire()
        placement = self.placement
        if placement is None:
            refusal = find_wait_refusal(now_s - self.entered_s, was_dispatched=self.attempt > 0, config=self._config)
            return self._end(RequestEvent.FAIL, refusal.code, refusal) if refusal is not None else []
        match self.phase:
            case AttemptPhase.OPENING:
                return self._repeat(placement.decode, self._opened, now_s)
            case AttemptPhase.STARTING if placement.prefill is not None:
                return self._repeat(placement.prefill, self._started, now_s)
            case AttemptPhase.PREFILLING if placement.prefill is not None and now_s - self._heard_s >= self._config.progress_timeout_s:
                return self._lose(placement.prefill, TransferTimeout("the prefill worker made no progress"), now_s)
            case AttemptPhase.DECODING:
                return self._ask(placement, now_s)
        return []

    def _repeat(self, worker: WorkerRef, message: Message | None, now_s: float) -> list[FlowEffect]:
        if message is None or now_s - self._said_s < self._config.control_rpc_s:
            return []
        if self._num_tries >= self._config.control_rpc_tries:
            return self._lose(worker, TransferTimeout("a worker did not answer"), now_s)
        self._num_tries += 1
        self._said_s = now_s
        return [Post(worker, message)]

    def _ask(self, placement: Placement, now_s: float) -> list[FlowEffect]:
        if now_s - self._heard_s >= self._config.silence_timeout_s:
            return self._lose(placement.decode, TransferTimeout("the decode worker fell silent"), now_s)
        if self._transfer is None or now_s - max(self._heard_s, self._said_s) < self._config.ask_after_s:
            return []
        self._said_s = now_s
        return [Post(placement.decode, Ask(self._transfer, len(self.output)))]

    def _expire(self) -> list[FlowEffect]:
        error = DeadlineExceeded(f"the request was not finished within {self._config.request_deadline_s:g} s")
        return self._end(RequestEvent.EXPIRE, "deadline", error)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _lose(self, worker: WorkerRef, error: ServingError, now_s: float) -> list[FlowEffect]:
        """`worker` failed the attempt: try again, elsewhere if there is a choice, or fail for good."""
        self.num_failures += 1
        self._avoid.add(worker)
        config = self._config
        retries = may_retry(
            retryable=error.retryable, num_failures=self.num_failures, now_s=now_s, deadline_s=self._deadline_s, config=config
        )
        if not retries:
            return self._end(RequestEvent.FAIL, error.code, error)
        self.not_before_s = now_s + retry_delay_s(self.num_failures, config)
        return self._leave("retry")

    def _put_off(self, worker: WorkerRef, now_s: float) -> list[FlowEffect]:
        """`worker` has no room for it, which is no failure: try elsewhere, or here again after a pause that grows."""
        self.num_delays += 1
        self._avoid.add(worker)
        self.not_before_s = now_s + retry_delay_s(1 + self.num_delays, self._config)
        return self._leave("put_off")

    def _leave(self, reason: str) -> list[FlowEffect]:
        """Give the current attempt up; the request itself goes on."""
        self.state = advance(REQUEST_TRANSITIONS, self.state, RequestEvent.RETRY)
        return self._close_attempt(reason)

    def _end(self, event: RequestEvent, reason: str, error: ServingError | None) -> list[FlowEffect]:
        self.state = advance(REQUEST_TRANSITIONS, self.state, event)
        return [*self._close_attempt(reason), Ended(self.state, reason, error)]

    def _close_attempt(self, reason: str) -> list[FlowEffect]:
        placement, transfer = self.placement, self._transfer
        self.placement = self._transfer = self._opened = self._started = None
        self.phase = AttemptPhase.NONE
        if placement is None or transfer is None:
            return []
        told = (placement.decode,) if placement.prefill is None or not self._is_source_told else (placement.decode, placement.prefill)
        return [Leave(transfer, placement, told, self._owes_prefill, reason)]
