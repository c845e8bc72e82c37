"""A prefill worker as its shell drives it: the parts put together, and each message sent to the part that understands it.

Knows: which part answers which message. Does not know how any of them does it.
"""

import asyncio
import logging
import time

from glm_runtime.engine.grammar_desk import GrammarDesk
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_plan import StepPlan, StepResult
from glm_runtime.engine.worker_config import WorkerNetwork
from glm_runtime.engine.worker_role import Outside
from kv_transfer.errors import TransferError
from kv_transfer.identity import PeerId
from kv_transfer.link import Party
from kv_transfer.messages import Message, PairHello, PairRefused, PairState, StartSource, WorkerLoad, WorkerTable
from kv_transfer.pairing import PairTerms
from kv_transfer.source_session import SourceSession
from kv_transfer.transfer_thread import TransferCallbacks, TransferThread
from kv_transfer.transports.base import Transport
from prefill_worker.config import PrefillConfig
from prefill_worker.engine import PrefillEngine
from prefill_worker.pairs import DecodePairs
from prefill_worker.sender import Sender
from prefill_worker.sequences import PrefillSequences

logger = logging.getLogger(__name__)


class PrefillRole:
    """See `WorkerRole`. Made on the control loop."""

    def __init__(
        self, model: LoadedModel, outside: Outside, me: Party, config: PrefillConfig, network: WorkerNetwork, transport: Transport
    ) -> None:
        self._model = model
        holders = StepHolders(model.pool)
        self._sequences = PrefillSequences(model.pool, holders)
        self._session = SourceSession(model.pool, me.incarnation, network.timers, model.layout.component_mask, model.sharding)
        callbacks = TransferCallbacks(on_done=_no_read_done, on_failed=_no_read_failed, on_destroyed=_agent_destroyed)
        self._transfers = TransferThread(transport, asyncio.get_running_loop(), callbacks, network.transport.poll_interval_s)
        terms = PairTerms.of_pool(
            model.layout,
            model.weights_version,
            model.memory,
            sharding=model.sharding,
            numerics=model.numerics,
            kernels=model.kernels,
        )
        self._pairs = DecodePairs(terms, self._transfers, outside)
        self._grammars = GrammarDesk(model.grammars, time.monotonic)
        self._sender = Sender(
            self._session,
            self._sequences,
            outside,
            layout=model.layout,
            request_limits=model.request_limits,
            config=config,
            grammars=self._grammars,
        )
        self._engine = PrefillEngine(model, self._sequences, holders, self._sender, config)

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def take_commands(self, now_s: float) -> None:
        """See `PrefillEngine`."""
        self._engine.take_commands(now_s)

    def decide(self, now_s: float) -> StepPlan | None:
        """See `PrefillEngine`."""
        return self._engine.decide(now_s)

    def run(self, plan: StepPlan) -> StepResult:
        """See `PrefillEngine`."""
        return self._engine.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """See `PrefillEngine`."""
        self._engine.publish(plan, result, now_s)

    # -- from outside --------------------------------------------------------------------------------------------------

    def receive(self, party: Party, message: Message, now_s: float) -> None:
        """Send a message to the part that it is for."""
        match message:
            case StartSource():
                self._sender.start(party.peer_id, message, now_s)
            case PairHello():
                self._pairs.receive(party, message)
            case PairRefused():
                logger.error("pair refused by peer=%s code=%s reason=%s", party.peer_id, message.code, message.reason)
            case _:
                self._sender.receive(party.peer_id, message, now_s)

    def peer_up(self, party: Party) -> None:
        """Nothing to do: decode workers say PairHello, gateways send requests."""

    def peer_lost(self, party: Party, now_s: float) -> None:
        """End what that party opened or was sent."""
        self._sender.peer_lost(party.peer_id, now_s)
        self._pairs.peer_lost(party)

    def table_changed(self, table: WorkerTable) -> None:
        """Nothing to do: decode workers dial."""

    def tick(self, now_s: float) -> None:
        """Look at the timers."""
        self._sender.tick(now_s)

    def start_draining(self) -> None:
        """Take no new request."""
        self._sender.start_draining()

    def give_up_all(self, message: str, now_s: float) -> None:
        """Fail every request as retryable elsewhere."""
        self._sender.give_up_all(message, now_s)

    async def close(self) -> None:
        """End the transfer thread and every agent."""
        self._grammars.close()
        await self._transfers.close()

    # -- what is said about it -----------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Hand-offs that are not released."""
        return self._sender.num_live

    def pair_states(self) -> tuple[PairState, ...]:
        """Decode workers tell of pairs: the READs are theirs."""
        return ()

    def load(self) -> WorkerLoad:
        """The worker's counters."""
        pool, meter = self._model.pool, self._engine.meter
        return WorkerLoad(
            num_running=self._sequences.num_computing,
            num_waiting=self._sequences.num_waiting,
            queued_prefill_tokens=self._sequences.num_queued_tokens(),
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            step_s=meter.step_s,
            num_steps=meter.num_steps,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_held=pool.num_held,
            blocks_quarantined=pool.num_quarantined,
            num_transfers=self._session.num_live,
            prefix_hit_tokens=self._engine.num_hit_tokens,
            prefix_query_tokens=self._engine.num_query_tokens,
        )


def _no_read_done(read_id: int) -> None:
    raise AssertionError(f"a prefill worker posts no READ, yet {read_id} is done")


def _no_read_failed(read_id: int, error: TransferError) -> None:
    raise AssertionError(f"a prefill worker posts no READ, yet {read_id} failed: {error}")


def _agent_destroyed(peer: PeerId) -> None:
    logger.info("agent destroyed peer=%s", peer)
