"""The source side of hand-offs: turns START_SOURCE into sequences and the engine's chunks into SEAL, PROGRESS and COMPLETE.

Knows: which request is refused and how the session's effects are carried out. Does not know scheduling (`scheduler.py`) or
the rules of a hand-off (`kv_transfer.source_session`).
"""

import logging
from collections.abc import Iterable

from glm_runtime.engine.grammar_desk import GrammarDesk
from glm_runtime.engine.prompt_scores import open_scores
from glm_runtime.engine.request_check import RequestLimits, check_request
from glm_runtime.engine.worker_role import Outside
from glm_runtime.sampling.grammar import GrammarState
from kv_transfer.block_keys import block_keys
from kv_transfer.errors import InvalidRequest
from kv_transfer.handoff import RECORD_SCHEMA, Dropped, Effect, Send
from kv_transfer.identity import PeerId, TransferId, count_tokens, peer_id
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import FailureKind, FinishReason, HandoffRecord, Message, StartSource, Taken, TokenLogprobs
from kv_transfer.source_session import SourceSession
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler import urgency
from prefill_worker.sequences import PrefillSequence, PrefillSequences

logger = logging.getLogger(__name__)


class Sender:
    """All hand-offs that start here. Called on the control loop."""

    def __init__(
        self,
        session: SourceSession,
        sequences: PrefillSequences,
        outside: Outside,
        *,
        layout: CacheLayout,
        request_limits: RequestLimits,
        config: PrefillConfig,
        grammars: GrammarDesk,
    ) -> None:
        self._session = session
        self._sequences = sequences
        self._outside = outside
        self._layout = layout
        self._request_limits = request_limits
        self._config = config
        self._grammars = grammars
        self._is_draining = False

    # -- from outside --------------------------------------------------------------------------------------------------

    def start(self, router: PeerId, message: StartSource, now_s: float) -> None:
        """Queue the prompt, or answer why not; a repeated message changes nothing."""
        sink = peer_id(message.sink.worker_id, message.sink.incarnation)
        is_new, effects = self._session.start(message, router, sink, now_s)
        self._carry_out(effects)
        if not is_new:
            return
        try:
            sequence = self._make_sequence(message, now_s)
        except InvalidRequest as error:
            self._fail(message.transfer, FailureKind.REQUEST_FAULT, error.code, error.message, now_s)
            return
        if self._is_draining:
            self._fail(message.transfer, FailureKind.RETRYABLE_ELSEWHERE, "draining", "this worker is draining", now_s)
        elif self._sequences.num_waiting >= self._config.max_waiting:
            waiting = f"{self._sequences.num_waiting} requests wait here already"
            self._fail(message.transfer, FailureKind.RETRYABLE_ELSEWHERE, "queue_full", waiting, now_s)
        else:
            self._sequences.add(sequence)
            if message.sampling.grammar is not None:
                self._request_grammar(sequence)
            self._outside.wake()

    def _request_grammar(self, sequence: PrefillSequence) -> None:
        """The sequence queues when its grammar has come."""

        def ready(state: GrammarState) -> None:
            sequence.grammar, sequence.awaits_grammar = state, False
            self._outside.wake()

        sequence.awaits_grammar = True
        emitted = sequence.token_ids(sequence.num_prompt_tokens, sequence.num_tokens)
        self._grammars.request(sequence.sampling, emitted, ready, lambda reason, now_s: self.grammar_failed(sequence, reason, now_s))

    def receive(self, peer: PeerId, message: Message, now_s: float) -> None:
        """Any other message of a hand-off."""
        self._carry_out(self._session.receive(peer, message, now_s))
        if isinstance(message, Taken):
            self._outside.wake()  # blocks come free chunk by chunk

    def peer_lost(self, peer: PeerId, now_s: float) -> None:
        """Whatever that peer opened here ends."""
        self._carry_out(self._session.peer_lost(peer, now_s))

    def tick(self, now_s: float) -> None:
        """Timers, and with them PROGRESS: also while a step takes long."""
        for sequence, position in self._sequences.live():
            self._session.progress(sequence.transfer, sequence.num_computed_tokens, position)
        self._carry_out(self._session.tick(now_s))

    def start_draining(self) -> None:
        """Refuse new requests."""
        self._is_draining = True

    def give_up_all(self, message: str, now_s: float) -> None:
        """Fail every hand-off that is not released: what is sealed needs nothing more from the engine, but it does from this process."""
        for transfer in self._session.live_transfers:
            self._fail(transfer, FailureKind.RETRYABLE_ELSEWHERE, "draining", message, now_s)

    @property
    def num_live(self) -> int:
        """Hand-offs that are not released."""
        return self._session.num_live

    # -- from the engine -----------------------------------------------------------------------------------------------

    def computing(self, sequence: PrefillSequence, now_s: float) -> None:
        """The sequence has its blocks. What of it was cached is sealed at once, so decode pulls it while the rest is computed."""
        self._carry_out(self._session.computing(sequence.transfer, now_s))
        if sequence.num_cached_tokens > sequence.need_from:
            self.sealed(sequence, 0, sequence.num_cached_tokens, now_s)

    def sealed(self, sequence: PrefillSequence, start: int, end: int, now_s: float) -> None:
        """Tokens [start, end) are stored for good."""
        size = self._layout.block_size_tokens
        blocks = tuple(sequence.block_table[start // size : -(-end // size)])
        self._session.progress(sequence.transfer, sequence.num_computed_tokens, 0)
        self._carry_out(self._session.seal(sequence.transfer, start, end, blocks, now_s))

    def completed(
        self,
        sequence: PrefillSequence,
        token: int,
        now_s: float,
        hidden_state: bytes | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Every chunk is sealed and the next token is drawn, the only time that this attempt draws it.

        hidden_state: of the last position, where the layout has MTP components, whose keys are then stored up to that position.
        """
        record = HandoffRecord(
            schema=RECORD_SCHEMA,
            first_index=sequence.first_index,
            token=token,
            finish=_finish_of(sequence, token),
            seed=sequence.sampling.seed,
            num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens),
            hidden_state=hidden_state,
            num_mtp_tokens=sequence.num_tokens if hidden_state is not None else 0,
            grammar_digest=sequence.grammar.digest() if sequence.grammar is not None else b"",
            logprobs=logprobs,
            prompt_logprobs=sequence.scores.told if sequence.scores is not None else (),
        )
        self._carry_out(self._session.complete(sequence.transfer, record, now_s))

    def grammar_failed(self, sequence: PrefillSequence, reason: str, now_s: float) -> None:
        """The request's constraint cannot be kept: nobody else could keep it."""
        if self._sequences.is_known(sequence):
            self._fail(sequence.transfer, FailureKind.REQUEST_FAULT, InvalidRequest.code, reason, now_s)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _make_sequence(self, message: StartSource, now_s: float) -> PrefillSequence:
        check_request(
            message.tokens,
            num_prompt_tokens=message.num_prompt_tokens,
            first_index=message.first_index,
            sampling=message.sampling,
            limits=self._request_limits,
        )
        self._grammars.check(message.sampling)
        layout = self._layout
        if not 0 <= message.need_from < count_tokens(message.tokens) or message.need_from % layout.block_size_tokens:
            raise InvalidRequest(
                f"need_from is {message.need_from}: it must be a block edge before the last of {count_tokens(message.tokens)} tokens"
            )
        return PrefillSequence(
            sequence_id=self._sequences.new_id(message.transfer),
            transfer=message.transfer,
            tokens=message.tokens,
            salt=message.cache_salt,
            keys=block_keys(message.tokens, message.cache_salt, layout.block_size_tokens, layout.looks_one_token_ahead),
            sampling=message.sampling,
            num_prompt_tokens=message.num_prompt_tokens,
            first_index=message.first_index,
            need_from=message.need_from,
            scores=open_scores(message.sampling, message.num_prompt_tokens, message.first_index),
            urgency_s=urgency(priority=message.priority, arrived_s=now_s, priority_weight_s=self._config.priority_weight_s),
        )

    def _fail(self, transfer: TransferId, kind: FailureKind, code: str, message: str, now_s: float) -> None:
        self._carry_out(self._session.fail(transfer, kind, code, message, now_s))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._outside.send(peer, message)
                case Dropped(transfer, reason, failure):
                    self._sequences.drop(transfer)
                    code = failure.code if failure is not None else ""
                    logger.info("source released request_id=%s attempt=%d reason=%s code=%s", *_names(transfer), reason, code)
                    self._outside.wake()  # blocks may have come free
                case _:
                    raise AssertionError(f"a source has no use for {type(effect).__name__}")


def _finish_of(sequence: PrefillSequence, token: int) -> FinishReason | None:
    if token in sequence.sampling.stop_token_ids:
        return FinishReason.STOP
    if sequence.first_index + 1 >= sequence.sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def _names(transfer: TransferId) -> tuple[str, int]:
    return transfer.request_id, transfer.attempt
