"""All live requests: places them, carries out what they ask for, hands them what workers say, and notes how each one ended.

Knows: every request, worker view and farewell of this gateway. Does not know sockets (it is given `post`) or text. Runs on one
asyncio loop; nothing in it blocks.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.block_keys import block_keys
from kv_transfer.errors import Draining
from kv_transfer.identity import PackedTokens, RequestId
from kv_transfer.messages import Closed, Gone, Message, Ping, TokenDelta, Tokens, WorkerTable
from router.admission import AdmissionView, find_refusal
from router.config import RouterConfig
from router.effects import Deliver, Ended, FlowEffect, Leave, Post, PrefillDone, SinkHadRoom, SinkWasBusy
from router.farewell import Farewells
from router.generation_request import GenerationRequest
from router.lifecycle import RequestState
from router.output import Output, Wakeup
from router.policy import Placement, WorkerRef, choose_pair
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.request_flow import AttemptPhase, RequestFlow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """How one request ended: what the log line and the status page say of it. ttft_s and itl_s are None without tokens."""

    request_id: RequestId
    outcome: str
    reason: str
    ttft_s: float | None
    itl_s: float | None
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prefill: str
    decode: str
    attempts: int
    retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayHooks:
    """What metrics want to hear. on_tokens: time since the previous tokens of the request (None for the first) and their number."""

    on_placed: Callable[[Placement], None]
    on_tokens: Callable[[float | None, int], None]
    on_ended: Callable[[RequestRecord], None]


@dataclass(slots=True)
class _Live:
    flow: RequestFlow
    output: Output
    order: int


class Relay:
    """The router's shell. `submit`, `finish` and `abort` are for the gateway, the `on_*` methods for links and directory."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        post: Callable[[WorkerRef, Message], bool],
        hooks: RelayHooks,
        clock: Callable[[], float] = time.monotonic,
        num_recent: int = 256,
    ) -> None:
        self.config = config
        self.registry = Registry(config.block_size_tokens)
        self.prefix_index = PrefixIndex(config.prefix_index_keys_per_worker)
        self.farewells = Farewells(
            repeat_s=config.control_rpc_s, max_repeat_s=config.progress_timeout_s, grace_s=config.link_grace_s
        )  # fmt: skip
        self.recent: deque[RequestRecord] = deque(maxlen=num_recent)
        self.is_draining = False
        self._post = post
        self._hooks = hooks
        self._clock = clock
        self._live: dict[RequestId, _Live] = {}
        self._waiting: dict[RequestId, _Live] = {}
        self._num_submitted = 0

    # -- for the gateway -----------------------------------------------------------------------------------------------

    def admit(self, num_requests: int) -> None:
        """Raise Overloaded when `num_requests` more may not enter now."""
        view = AdmissionView(is_draining=self.is_draining, num_in_flight=len(self._live), num_waiting=len(self._waiting))
        refusal = find_refusal(view, self.config, num_requests)
        if refusal is not None:
            raise refusal

    def submit(self, request: GenerationRequest, wakeup: Wakeup) -> Output:
        """Take an admitted request; its tokens come to the Output, which sets `wakeup`. Keys of its prompt that it brings are kept."""
        now_s = self._clock()
        if request.sampling.prompt_logprobs < 0 and not request.block_keys:  # a prompt that is scored shares no block with anybody
            request = msgspec.structs.replace(request, block_keys=self.prompt_keys(request.prompt, request.cache_salt))
        live = _Live(RequestFlow(request, self.config, now_s), Output(wakeup), self._num_submitted)
        self._num_submitted += 1
        self._live[request.request_id] = self._waiting[request.request_id] = live
        self._pump(now_s)
        return live.output

    def prompt_keys(self, prompt: PackedTokens, salt: bytes) -> tuple[bytes, ...]:
        """Keys of a prompt's blocks, for requests that share it."""
        return tuple(block_keys(prompt, salt, self.config.block_size_tokens, self.config.keys_look_ahead))

    def finish(self, request_id: RequestId, reason: str) -> None:
        """The gateway needs no more tokens of it. Idempotent."""
        live = self._live.get(request_id)
        if live is not None:
            self._carry_out(live, live.flow.finish(reason), self._clock())

    def abort(self, request_id: RequestId, reason: str) -> None:
        """The client is gone: cancelled everywhere, now. Idempotent."""
        live = self._live.get(request_id)
        if live is not None:
            self._carry_out(live, live.flow.abort(reason), self._clock())

    def close(self) -> None:
        """End every request that is left; nothing enters any more."""
        self.is_draining = True
        if self._live:
            logger.warning("requests given up at shutdown num_requests=%d", len(self._live))
        for live in list(self._live.values()):
            error = Draining("this gateway is shutting down; send the request again", retry_after_s=self.config.overloaded_retry_after_s)
            self._carry_out(live, live.flow.fail(error), self._clock())

    def count_phases(self) -> dict[str, int]:
        """Live requests by what they are doing."""
        counts = Counter(
            "waiting" if live.flow.phase is AttemptPhase.NONE else live.flow.phase.value for live in self._live.values()
        )  # fmt: skip
        return {phase: counts[phase] for phase in ("waiting", "opening", "starting", "prefilling", "decoding")}

    @property
    def num_live(self) -> int:
        """Requests without a terminal state."""
        return len(self._live)

    # -- for links and directory ---------------------------------------------------------------------------------------

    def on_table(self, table: WorkerTable) -> None:
        """The directory's table has changed."""
        now_s = self._clock()
        for ref in self.registry.apply_table(table.entries):
            logger.info("worker gone worker_id=%s incarnation=%x", ref.worker_id, ref.incarnation)
            self.prefix_index.drop(ref)
            self.farewells.worker_gone(ref)
            self._lose_worker(ref, now_s)
        self._pump(now_s)

    def on_link_up(self, worker: WorkerRef) -> None:
        """A worker can be talked to."""
        now_s = self._clock()
        self.registry.set_linked(worker, is_linked=True)
        self._post_all(self.farewells.link_up(worker))
        self._pump(now_s)

    def on_link_down(self, worker: WorkerRef) -> None:
        """A worker can no longer be talked to: its requests go elsewhere at once."""
        now_s = self._clock()
        self.registry.set_linked(worker, is_linked=False)
        self.farewells.link_down(worker, now_s)
        self._lose_worker(worker, now_s)
        self._pump(now_s)

    def on_message(self, worker: WorkerRef, message: Message) -> None:
        """One message of a worker, in order."""
        now_s = self._clock()
        if isinstance(message, Tokens):
            for delta in message.deltas:
                self._take_tokens(worker, delta, now_s)
        elif isinstance(message, Ping):
            self.registry.apply_ping(worker, message)
            self._pump(now_s)
        else:
            self._take_answer(worker, message, now_s)

    def tick(self) -> None:
        """Look at every timer."""
        now_s = self._clock()
        for live in list(self._live.values()):
            effects = live.flow.tick(now_s)
            if effects:
                self._carry_out(live, effects, now_s)
        self._post_all(self.farewells.tick(now_s))
        self._pump(now_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(self.config.tick_s)
            self.tick()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take_tokens(self, worker: WorkerRef, delta: TokenDelta, now_s: float) -> None:
        live = self._live.get(delta.transfer.request_id)
        if live is None:
            return
        before_s = live.flow.last_token_s
        effects = live.flow.receive_tokens(worker, delta, now_s)
        if live.flow.last_token_s != before_s:
            self._hooks.on_tokens(None if before_s is None else now_s - before_s, len(delta.tokens))
        self._carry_out(live, effects, now_s)

    def _take_answer(self, worker: WorkerRef, message: Message, now_s: float) -> None:
        transfer = getattr(message, "transfer", None)
        if transfer is None:
            return
        if isinstance(message, Closed | Gone):
            self.farewells.answered(worker, transfer)
        live = self._live.get(transfer.request_id)
        if live is not None:
            self._carry_out(live, live.flow.receive(worker, message, now_s), now_s)
            self._pump(now_s)

    def _lose_worker(self, worker: WorkerRef, now_s: float) -> None:
        for live in list(self._live.values()):
            self._carry_out(live, live.flow.worker_lost(worker, now_s), now_s)

    def _pump(self, now_s: float) -> None:
        """Give waiting requests their pair, oldest first."""
        if not self._waiting or not self.registry.has_open_decode(now_s):
            return
        for live in sorted(self._waiting.values(), key=lambda item: item.order):
            if live.flow.wants_pair(now_s):
                self._place(live, now_s)
                if not self.registry.has_open_decode(now_s):
                    return
        if not self._waiting:
            self.registry.forget_busy(now_s)

    def _place(self, live: _Live, now_s: float) -> None:
        keys = live.flow.request.block_keys

        def overlap_tokens(ref: WorkerRef) -> int:
            return self.prefix_index.match(ref, keys) * self.config.block_size_tokens

        decodes = self.registry.decode_candidates(overlap_tokens, now_s)
        if not decodes:
            return
        placement = choose_pair(
            live.flow.demand(),
            self.registry.prefill_candidates(overlap_tokens),
            decodes,
            decode_row_tokens=self.config.decode_row_tokens,
            local_prefill_below_tokens=self.config.local_prefill_below_tokens,
        )
        if placement is None:
            return
        self.registry.book(placement)
        for ref in (placement.decode, placement.prefill):
            if ref is not None:
                self.prefix_index.record(ref, keys)
        self._hooks.on_placed(placement)
        del self._waiting[live.flow.request.request_id]
        prefill = None if placement.prefill is None else self.registry.address(placement.prefill)
        decode = self.registry.address(placement.decode)
        self._carry_out(live, live.flow.place(placement, decode, prefill, now_s), now_s)

    def _carry_out(self, live: _Live, effects: list[FlowEffect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Deliver():
                    live.output.num_cached_tokens = live.flow.num_cached_tokens
                    live.output.prompt_logprobs = live.output.prompt_logprobs or effect.prompt_logprobs
                    live.output.put(effect.tokens, effect.finish, effect.logprobs)
                case Post():
                    self._post(effect.worker, effect.message)
                case PrefillDone():
                    self.registry.release_prefill(effect.placement)
                case Leave():
                    self._leave(live, effect, now_s)
                case SinkWasBusy():
                    self.registry.mark_busy(effect.worker, effect.until_s)
                case SinkHadRoom():
                    self.registry.mark_ready(effect.worker)
                case Ended():
                    self._end(live, effect, now_s)

    def _leave(self, live: _Live, effect: Leave, now_s: float) -> None:
        if effect.owes_prefill:
            self.registry.release_prefill(effect.placement)
        self.registry.release_decode(effect.placement)
        self.registry.mark_relieved(effect.placement.decode, now_s)
        for worker in effect.workers:
            if self.registry.find(worker) is not None:
                self._post_all(self.farewells.begin(worker, effect.transfer, effect.reason, now_s))
        self._waiting[live.flow.request.request_id] = live

    def _end(self, live: _Live, effect: Ended, now_s: float) -> None:
        request_id = live.flow.request.request_id
        del self._live[request_id]
        self._waiting.pop(request_id, None)
        live.output.end(effect.error)
        record = _make_record(live.flow, effect, now_s)
        self.recent.append(record)
        self._hooks.on_ended(record)
        level = logging.WARNING if effect.state is RequestState.FAILED and effect.error is not None else logging.INFO
        logger.log(
            level,
            "request ended request_id=%s outcome=%s reason=%s ttft_ms=%s duration_ms=%d prompt_tokens=%d cached_tokens=%d "
            "output_tokens=%d prefill=%s decode=%s retries=%d",
            record.request_id, record.outcome, record.reason, _milliseconds(record.ttft_s), round(record.duration_s * 1e3),
            record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens, record.prefill, record.decode, record.retries,
        )  # fmt: skip
        self._pump(now_s)

    def _post_all(self, posts: list[Post]) -> None:
        for post in posts:
            self._post(post.worker, post.message)


def _make_record(flow: RequestFlow, effect: Ended, now_s: float) -> RequestRecord:
    num_output_tokens = len(flow.output)
    ttft_s = itl_s = None
    if flow.first_token_s is not None and flow.last_token_s is not None:
        ttft_s = flow.first_token_s - flow.entered_s
        itl_s = (flow.last_token_s - flow.first_token_s) / (num_output_tokens - 1) if num_output_tokens > 1 else None
    placement = flow.last_placement
    return RequestRecord(
        request_id=flow.request.request_id,
        outcome=effect.state.value,
        reason=effect.reason,
        ttft_s=ttft_s,
        itl_s=itl_s,
        duration_s=now_s - flow.entered_s,
        num_prompt_tokens=flow.request.num_prompt_tokens,
        num_cached_tokens=flow.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        prefill=placement.prefill.worker_id if placement is not None and placement.prefill is not None else "-",
        decode=placement.decode.worker_id if placement is not None else "-",
        attempts=flow.attempt,
        retries=max(flow.attempt - 1, 0),
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else str(round(seconds * 1e3))
