"""The sink side of hand-offs: turns OPEN_SINK into sequences, carries out the session's effects, answers ASK.

Knows: which request is refused or put off, and what each effect means for the engine. Does not know scheduling
(`scheduler.py`) or the rules of a hand-off (`kv_transfer.sink_session`).
"""

import logging
from collections.abc import Iterable

from decode_worker.config import DecodeConfig
from decode_worker.pairs import PrefillPairs
from decode_worker.reads import Reads
from decode_worker.sequences import DecodeSequence, DecodeSequences, Phase
from decode_worker.token_outbox import TokenOutbox
from glm_runtime.engine.grammar_desk import GrammarDesk
from glm_runtime.engine.prompt_scores import open_scores
from glm_runtime.engine.request_check import RequestLimits, check_request
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.worker_role import Outside
from glm_runtime.sampling.grammar import GrammarState
from glm_runtime.sampling.history import open_history
from kv_transfer.block_pool import BlockPool
from kv_transfer.errors import InvalidRequest, TransferError
from kv_transfer.handoff import (
    DestroyAgent,
    Dropped,
    Effect,
    FillLocally,
    PostRead,
    Ready,
    RecordArrived,
    Send,
    ShareBlocks,
    SuspectPeer,
)
from kv_transfer.identity import PackedTokens, PeerId, SequenceId, TransferId, count_tokens, peer_id
from kv_transfer.messages import Ask, Failed, FailureKind, HandoffRecord, Message, OpenSink
from kv_transfer.sink_session import SinkSession

logger = logging.getLogger(__name__)


class Receiver:
    """All hand-offs that end here, and the requests that are filled here. Called on the control loop."""

    def __init__(
        self,
        session: SinkSession,
        sequences: DecodeSequences,
        holders: StepHolders,
        outbox: TokenOutbox,
        outside: Outside,
        reads: Reads,
        pairs: PrefillPairs,
        *,
        pool: BlockPool,
        looks_one_token_ahead: bool = False,
        request_limits: RequestLimits,
        config: DecodeConfig,
        grammars: GrammarDesk,
    ) -> None:
        self._session = session
        self._sequences = sequences
        self._holders = holders
        self._outbox = outbox
        self._outside = outside
        self._reads = reads
        self._pairs = pairs
        self._pool = pool
        self._looks_one_token_ahead = looks_one_token_ahead
        self._request_limits = request_limits
        self._config = config
        self._grammars = grammars
        self._is_draining = False
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    # -- from outside --------------------------------------------------------------------------------------------------

    def open(self, router: PeerId, message: OpenSink, now_s: float) -> None:
        """Take the request, put it off, or say why it cannot be; a repeated message gets the same answer."""
        transfer = message.transfer
        is_known = self._sequences.of_transfer(transfer) is not None
        source = peer_id(message.source.worker_id, message.source.incarnation) if message.source is not None else None
        if not is_known and (refusal := self._refusal(message, source)) is not None:
            self._outside.send(router, refusal)
            return
        effects = self._session.open(message, router, source, now_s, self._busy_s())
        if not is_known and self._session.is_live(transfer):
            self._add(message, router)
        self._carry_out(effects, now_s)
        if not is_known and message.sampling.grammar is not None and (sequence := self._sequences.of_transfer(transfer)) is not None:
            self._request_grammar(sequence)

    def _request_grammar(self, sequence: DecodeSequence) -> None:
        """Steps draw for the sequence when its grammar has come; the record's token may come before it."""

        def ready(state: GrammarState) -> None:
            self._sequences.take_grammar(sequence, state)
            if self._follow_grammar(sequence, tuple(sequence.emitted_from(sequence.first_index)), self._grammars.now_s()):
                self._outside.wake()

        def failed(reason: str, now_s: float) -> None:
            self.grammar_failed(sequence, reason, now_s)

        self._sequences.await_grammar(sequence)
        emitted = sequence.token_ids(sequence.num_prompt_tokens, sequence.num_given_tokens)
        self._grammars.request(sequence.sampling, emitted, ready, failed)

    def ask(self, peer: PeerId, message: Ask, now_s: float) -> None:
        """Say again what was emitted from `next_index` on, or GONE."""
        sequence = self._sequences.of_transfer(message.transfer)
        if sequence is None or sequence.router != peer:
            self.receive(peer, message, now_s)
        else:  # an empty answer, too, says that the request lives
            index = max(message.next_index, sequence.first_index)
            self._outbox.add(sequence, index, tuple(sequence.emitted_from(index)))
            self._outbox.flush()

    def receive(self, peer: PeerId, message: Message, now_s: float) -> None:
        """Any other message of a hand-off."""
        self._carry_out(self._session.receive(peer, message, now_s), now_s)

    def peer_lost(self, peer: PeerId, now_s: float) -> None:
        """What that gateway opened ends; what that source still owes fails."""
        self._carry_out(self._session.peer_lost(peer, now_s), now_s)

    def read_done(self, read_id: int, now_s: float) -> None:
        """Every byte of the READ has landed."""
        self._carry_out(self._session.read_done(read_id, now_s), now_s)
        self._outside.wake()  # the last READ of a dropped transfer frees its blocks

    def read_failed(self, read_id: int, error: TransferError, now_s: float) -> None:
        """The READ raised."""
        self._carry_out(self._session.read_failed(read_id, error, now_s), now_s)

    def agent_destroyed(self, peer: PeerId, now_s: float) -> None:
        """No READ from that peer is in flight any more."""
        self._carry_out(self._session.agent_destroyed(peer, now_s), now_s)
        self._outside.wake()  # so do those that were ended

    def tick(self, now_s: float) -> None:
        """Timers."""
        self._carry_out(self._session.tick(now_s), now_s)

    def start_draining(self) -> None:
        """Refuse new requests."""
        self._is_draining = True

    def give_up_all(self, message: str, now_s: float) -> None:
        """Fail every request that has not ended, as retryable elsewhere."""
        for sequence in self._sequences.all():
            self._carry_out(self._session.fail(sequence.transfer, FailureKind.RETRYABLE_ELSEWHERE, "draining", message, now_s), now_s)

    @property
    def num_live(self) -> int:
        """Requests whose gateway does not have all of them yet."""
        return self._session.num_live

    # -- from the engine -----------------------------------------------------------------------------------------------

    def credit_blocks(self, sequence: DecodeSequence) -> int:
        """Blocks that the sequence may still grow by whatever the others do."""
        return self._session.credit_blocks(sequence.transfer)

    def grow(self, sequence: DecodeSequence) -> None:
        """Give the sequence one more block. Raises PoolExhausted."""
        # No step is in flight, so nobody else reads this list now.
        sequence.block_table += self._session.grow(sequence.transfer, 1)

    def preempt(self, sequence: DecodeSequence, now_s: float) -> None:
        """Take the sequence's blocks away; no step is in flight."""
        self._sequences.move(sequence, Phase.PREEMPTED)
        self._holders.uncover(sequence.sequence_id)
        sequence.lose_blocks()
        self._carry_out(self._session.preempted(sequence.transfer, now_s), now_s)

    def resume(self, sequence: DecodeSequence, now_s: float) -> None:
        """Begin to fill the sequence again. Raises PoolExhausted."""
        self._carry_out(self._session.resume(sequence.transfer, PackedTokens(bytes(sequence.tokens)), now_s), now_s)

    def filled(self, sequence: DecodeSequence, now_s: float) -> None:
        """All that was known of the sequence is in the cache now."""
        if not sequence.is_ready:
            sequence.is_ready = True
            self._carry_out(self._session.filled_locally(sequence.transfer, now_s), now_s)

    def run(self, sequence: DecodeSequence, now_s: float) -> None:
        """The sequence has a token to go on from: it joins the running batch."""
        self._sequences.move(sequence, Phase.RUNNING)
        self._carry_out(self._session.running(sequence.transfer, now_s), now_s)

    def finish(self, sequence: DecodeSequence, now_s: float) -> None:
        """The last token is emitted: the blocks go, the tokens stay until the router has them."""
        self._sequences.move(sequence, Phase.FINISHED)
        self._holders.uncover(sequence.sequence_id)
        sequence.lose_blocks()
        self._carry_out(self._session.finished(sequence.transfer, now_s), now_s)

    def _follow_grammar(self, sequence: DecodeSequence, tokens: tuple[int, ...], now_s: float) -> bool:
        """Take what the record has brought into the grammar, if that has come; False when the request has failed by it."""
        if not sequence.follow_grammar(tokens):
            self.grammar_broken(sequence, now_s)
            return False
        if not sequence.has_grammar_of_record():
            logger.error(
                "prefill reads a grammar otherwise request_id=%s attempt=%d", sequence.transfer.request_id, sequence.transfer.attempt
            )
            message = "prefill and decode read the grammar differently; their llguidance versions must be the same"
            kind = FailureKind.RETRYABLE_ELSEWHERE
            self._carry_out(self._session.fail(sequence.transfer, kind, "grammar_mismatch", message, now_s), now_s)
            return False
        return True

    def grammar_broken(self, sequence: DecodeSequence, now_s: float) -> None:
        """The sequence's newest tokens, which nobody has been shown, are not of its grammar, or that has become too complex."""
        assert sequence.grammar is not None, "a sequence without a grammar breaks none"
        self.grammar_failed(sequence, _cannot_go_on(sequence.grammar), now_s)

    def grammar_failed(self, sequence: DecodeSequence, reason: str, now_s: float) -> None:
        """The request's constraint cannot be kept: nobody else could keep it."""
        if self._sequences.of_id(sequence.sequence_id) is sequence:
            failure = self._session.fail(sequence.transfer, FailureKind.REQUEST_FAULT, InvalidRequest.code, reason, now_s)
            self._carry_out(failure, now_s)

    # -- effects -------------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._outside.send(peer, message)
                case PostRead():
                    self._reads.post(effect, now_s)
                case SuspectPeer(peer):
                    self._pairs.suspect(peer)
                case DestroyAgent(peer):
                    self._pairs.destroy(peer)
                case ShareBlocks(copies):
                    self._holders.copy_later(copies)
                    self._outside.wake()
                case RecordArrived(transfer, record):
                    self._take_record(self._of(transfer), record, now_s)
                case Ready(transfer):
                    self._take_filled(self._of(transfer), now_s)
                case FillLocally(transfer, from_token):
                    self._begin_fill(self._of(transfer), from_token, now_s)
                case Dropped(transfer, reason, failure):
                    self._drop(transfer, reason, failure)

    def _of(self, transfer: TransferId) -> DecodeSequence:
        sequence = self._sequences.of_transfer(transfer)
        assert sequence is not None, f"the session knows {transfer.request_id} attempt {transfer.attempt}, the worker does not"
        return sequence

    def _take_record(self, sequence: DecodeSequence, record: HandoffRecord, now_s: float) -> None:
        """Show the token that prefill drew at once, blocks or no blocks."""
        assert sequence.next_index == sequence.first_index, "the record's token is the first of its attempt"
        sequence.num_cached_tokens = record.num_cached_tokens
        sequence.seed_hidden = record.hidden_state
        sequence.prompt_logprobs, sequence.scores = record.prompt_logprobs, None
        sequence.append(record.token, record.logprobs)
        sequence.record_grammar_digest = record.grammar_digest
        if not self._follow_grammar(sequence, (record.token,), now_s):
            return
        self._outbox.add(sequence, sequence.first_index, (record.token,))
        self._outbox.flush()

    def _take_filled(self, sequence: DecodeSequence, now_s: float) -> None:
        """Every given token is in the cache. Without the record's token the last one is computed again, to draw from it."""
        sequence.is_ready = True
        self._take_block_table(sequence)
        sequence.num_stored_tokens = sequence.num_given_tokens
        size = self._pool.block_size_tokens
        sequence.num_published_blocks = (sequence.num_given_tokens - self._looks_one_token_ahead) // size
        if sequence.num_tokens > sequence.num_given_tokens >= (sequence.num_published_blocks + 1) * size:
            # A full last block has committed without its key, which needs the token after it: the record has brought that.
            sequence.publish_stored(self._pool, self._looks_one_token_ahead)
        if sequence.finish is not None:
            self.finish(sequence, now_s)
        elif sequence.num_tokens > sequence.num_given_tokens:
            self.run(sequence, now_s)
        elif sequence.scores is not None:
            lost = "the prompt's log-probabilities were lost with the record; only another attempt can compute them"
            self._carry_out(self._session.fail(sequence.transfer, FailureKind.RETRYABLE_ELSEWHERE, "record_lost", lost, now_s), now_s)
        else:
            # Its keys are stored once more where they are: the same bytes from the same tokens, so who shares the block sees no change.
            sequence.num_stored_tokens -= 1
            self._sequences.move(sequence, Phase.FILLING)
        self._outside.wake()

    def _begin_fill(self, sequence: DecodeSequence, from_token: int, now_s: float) -> None:
        if sequence.scores is not None and from_token:
            shared = "a prompt whose log-probabilities are asked for needs a cache salt of its own: part of this one is cached"
            self._carry_out(self._session.fail(sequence.transfer, FailureKind.REQUEST_FAULT, InvalidRequest.code, shared, now_s), now_s)
            return
        self._take_block_table(sequence)
        sequence.num_stored_tokens = from_token
        sequence.num_published_blocks = from_token // self._pool.block_size_tokens
        if sequence.next_index == sequence.first_index:
            sequence.num_cached_tokens = min(from_token, sequence.num_prompt_tokens)
        self._sequences.move(sequence, Phase.FILLING)
        self._outside.wake()

    def _take_block_table(self, sequence: DecodeSequence) -> None:
        sequence.block_table = list(self._session.block_table(sequence.transfer))

    def _drop(self, transfer: TransferId, reason: str, failure: Failed | None) -> None:
        sequence = self._sequences.drop(transfer)
        if sequence is None:
            return
        self._holders.uncover(sequence.sequence_id)
        logger.info(
            "sink dropped request_id=%s attempt=%d phase=%s emitted=%d reason=%s code=%s",
            transfer.request_id,
            transfer.attempt,
            sequence.phase.value,
            sequence.next_index - sequence.first_index,
            reason,
            failure.code if failure is not None else "",
        )
        self._outside.wake()  # blocks may have come free

    # -- opening -------------------------------------------------------------------------------------------------------

    def _refusal(self, message: OpenSink, source: PeerId | None) -> Failed | None:
        """Why a new request is not even put to the session."""
        try:
            check_request(
                message.tokens,
                num_prompt_tokens=message.num_prompt_tokens,
                first_index=message.first_index,
                sampling=message.sampling,
                limits=self._request_limits,
            )
            self._grammars.check(message.sampling)
        except InvalidRequest as error:
            return Failed(message.transfer, FailureKind.REQUEST_FAULT, error.code, error.message)
        if self._is_draining:
            return Failed(message.transfer, FailureKind.RETRYABLE_ELSEWHERE, "draining", "this worker is draining")
        if source is not None and not self._pairs.knows(source):
            # Its loss has been dealt with already, so nobody would ever tell of it again.
            return Failed(message.transfer, FailureKind.RETRYABLE_ELSEWHERE, "pair_down", f"{source} is not connected here")
        return None

    def _busy_s(self) -> float | None:
        """Preempted sequences have waited longest: nobody new comes before they are back."""
        is_full = self._sequences.num_active >= self._config.max_running
        return self._config.busy_retry_after_s if is_full or self._sequences.in_phase(Phase.PREEMPTED) else None

    def _add(self, message: OpenSink, router: PeerId) -> None:
        transfer, age = message.transfer, self._sequences.new_age()
        sequence = DecodeSequence(
            sequence_id=SequenceId(f"{transfer.request_id}.{transfer.attempt}#{age}"),
            age=age,
            transfer=transfer,
            router=router,
            packed=bytearray(message.tokens),
            num_tokens=count_tokens(message.tokens),
            num_given_tokens=count_tokens(message.tokens),
            num_prompt_tokens=message.num_prompt_tokens,
            first_index=message.first_index,
            salt=message.cache_salt,
            sampling=message.sampling,
            history=open_history(message.tokens, message.num_prompt_tokens, message.sampling),
            scores=open_scores(message.sampling, message.num_prompt_tokens, message.first_index),
        )
        self._sequences.add(sequence)
        self.num_query_tokens += sequence.num_given_tokens
        self.num_hit_tokens += self._session.have_tokens(transfer)


def _cannot_go_on(state: GrammarState) -> str:
    return f"the grammar cannot go on: {state.error}"
