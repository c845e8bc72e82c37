"""A decode worker as its shell drives it: the parts put together, and each message sent to the part that understands it.

Knows: which part answers which message. Does not know how any of them does it.
"""

import asyncio
import logging
import random
import time

from decode_worker.config import DecodeConfig
from decode_worker.engine import DecodeEngine
from decode_worker.pairs import PrefillPairs
from decode_worker.reads import Reads
from decode_worker.receiver import Receiver
from decode_worker.sequences import DecodeSequences, Phase
from decode_worker.token_outbox import TokenOutbox
from glm_runtime.engine.grammar_desk import GrammarDesk
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.worker_config import WorkerNetwork
from glm_runtime.engine.worker_role import Outside
from kv_transfer.errors import TransferError
from kv_transfer.identity import PeerId
from kv_transfer.link import Party
from kv_transfer.messages import Ask, Message, OpenSink, PairHello, PairRefused, PairState, Stale, WorkerLoad, WorkerTable
from kv_transfer.pairing import PairTerms
from kv_transfer.quarantine import QuarantineWatch
from kv_transfer.sink_session import SinkSession
from kv_transfer.transfer_thread import TransferCallbacks, TransferThread
from kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)


class DecodeRole:
    """See `WorkerRole`. Made on the control loop."""

    def __init__(
        self, model: LoadedModel, outside: Outside, me: Party, config: DecodeConfig, network: WorkerNetwork, transport: Transport
    ) -> None:
        self._model = model
        self._sequences = DecodeSequences()
        holders = StepHolders(model.pool)
        outbox = TokenOutbox(outside)
        self._session = SinkSession(
            model.pool,
            me.incarnation,
            network.timers,
            model.layout,
            transport.destroying_proven,
            hidden_state_bytes=model.hidden_state_bytes,
            sharding=model.sharding,
        )
        callbacks = TransferCallbacks(on_done=self._read_done, on_failed=self._read_failed, on_destroyed=self._agent_destroyed)
        self._transfers = TransferThread(transport, asyncio.get_running_loop(), callbacks, network.transport.poll_interval_s)
        self._reads = Reads(self._transfers, model.memory.block_bytes)
        terms = PairTerms.of_pool(
            model.layout,
            model.weights_version,
            model.memory,
            sharding=model.sharding,
            numerics=model.numerics,
            kernels=model.kernels,
        )
        self._pairs = PrefillPairs(terms, self._transfers, self._reads, outside, network, random.Random(me.incarnation))
        self._grammars = GrammarDesk(model.grammars, time.monotonic)
        self._receiver = Receiver(
            self._session,
            self._sequences,
            holders,
            outbox,
            outside,
            self._reads,
            self._pairs,
            pool=model.pool,
            looks_one_token_ahead=model.layout.looks_one_token_ahead,
            request_limits=model.request_limits,
            config=config,
            grammars=self._grammars,
        )
        self._num_stale = 0
        self._outside = outside
        self._quarantine = QuarantineWatch(model.pool, network.timers)
        self._is_given_up = False
        self._engine = DecodeEngine(model, self._sequences, holders, self._receiver, outbox, config)

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def take_commands(self, now_s: float) -> None:
        """See `DecodeEngine`."""
        self._engine.take_commands(now_s)

    def decide(self, now_s: float) -> StepPlan | None:
        """See `DecodeEngine`."""
        return self._engine.decide(now_s)

    def run(self, plan: StepPlan) -> StepResult:
        """See `DecodeEngine`."""
        return self._engine.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """See `DecodeEngine`."""
        self._engine.publish(plan, result, now_s)

    # -- from outside --------------------------------------------------------------------------------------------------

    def receive(self, party: Party, message: Message, now_s: float) -> None:
        """Send a message to the part that it is for."""
        match message:
            case OpenSink():
                self._receiver.open(party.peer_id, message, now_s)
            case Ask():
                self._receiver.ask(party.peer_id, message, now_s)
            case PairHello() | PairRefused():
                self._pairs.receive(party, message)
            case _:
                self._num_stale += isinstance(message, Stale)
                self._receiver.receive(party.peer_id, message, now_s)

    def peer_up(self, party: Party) -> None:
        """A prefill worker may be paired with now."""
        self._pairs.peer_up(party)

    def peer_lost(self, party: Party, now_s: float) -> None:
        """End what that party opened or owes."""
        self._receiver.peer_lost(party.peer_id, now_s)
        self._pairs.peer_lost(party)

    def table_changed(self, table: WorkerTable) -> None:
        """Look for new prefill workers."""
        self._pairs.table_changed(table)

    def tick(self, now_s: float) -> None:
        """Look at the timers."""
        self._receiver.tick(now_s)
        if not self._is_given_up and self._quarantine.is_over(now_s):
            self._is_given_up = True
            pool = self._model.pool
            logger.error("too many blocks are quarantined num_quarantined=%d num_blocks=%d", pool.num_quarantined, pool.num_blocks)
            self._outside.drain()

    def start_draining(self) -> None:
        """Take no new request."""
        self._receiver.start_draining()

    def give_up_all(self, message: str, now_s: float) -> None:
        """Fail every request as retryable elsewhere."""
        self._receiver.give_up_all(message, now_s)

    async def close(self) -> None:
        """End the pairs, then the transfer thread; every READ has ended then."""
        self._grammars.close()
        await self._pairs.close()
        await self._transfers.close()

    # -- READs ---------------------------------------------------------------------------------------------------------

    def _read_done(self, read_id: int) -> None:
        now_s = time.monotonic()
        peer = self._reads.done(read_id, now_s)
        if peer is not None:
            self._pairs.trust(peer)
        self._receiver.read_done(read_id, now_s)

    def _read_failed(self, read_id: int, error: TransferError) -> None:
        self._reads.failed(read_id)
        self._receiver.read_failed(read_id, error, time.monotonic())

    def _agent_destroyed(self, peer: PeerId) -> None:
        self._reads.ended(peer)
        self._receiver.agent_destroyed(peer, time.monotonic())

    # -- what is said about it -----------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests whose gateway does not have all of them yet."""
        return self._receiver.num_live

    def pair_states(self) -> tuple[PairState, ...]:
        """The prefill peers."""
        return self._pairs.states()

    def load(self) -> WorkerLoad:
        """The worker's counters."""
        pool, meter, sequences = self._model.pool, self._engine.meter, self._sequences
        filling = sequences.in_phase(Phase.FILLING)
        return WorkerLoad(
            num_running=len(sequences.in_phase(Phase.RUNNING)),
            num_waiting=sequences.num_active - len(sequences.in_phase(Phase.RUNNING)),
            queued_prefill_tokens=sum(sequence.num_tokens - sequence.num_stored_tokens for sequence in filling),
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            step_s=meter.step_s,
            num_steps=meter.num_steps,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_held=pool.num_held,
            blocks_quarantined=pool.num_quarantined,
            num_transfers=self._session.num_live,
            bytes_read=self._reads.bytes_read,
            read_s=self._reads.read_s,
            prefix_hit_tokens=self._receiver.num_hit_tokens,
            prefix_query_tokens=self._receiver.num_query_tokens,
            preemptions=self._engine.num_preemptions,
            stale_validations=self._num_stale,
            drafted=tuple(self._engine.drafts.meter.drafted[: self._model.max_drafts]),
            accepted=tuple(self._engine.drafts.meter.accepted[: self._model.max_drafts]),
        )
