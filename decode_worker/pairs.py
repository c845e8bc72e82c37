"""The decode side of pairs: finds every prefill worker, makes an agent for each, proves the path with a probe READ, heals it.

Knows: when a pair may be used. Does not know what is read through it (`receiver.py`) or how (`kv_transfer.transports`).
A pair is up from its first good probe until an agent is destroyed or the peer is lost; then it is made anew under its next
epoch, with growing pauses. A peer that refuses, or is refused, is left alone until it starts again: that is an operator's matter.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, field

from decode_worker.reads import Reads
from glm_runtime.engine.worker_config import WorkerNetwork
from glm_runtime.engine.worker_role import Outside
from kv_transfer.errors import LayoutMismatch, TransferError, TransferTimeout
from kv_transfer.identity import Incarnation, PeerId, WorkerId
from kv_transfer.link import Party
from kv_transfer.messages import PairHello, PairRefused, PairState, PartyKind, WorkerAddress, WorkerState, WorkerTable
from kv_transfer.pairing import PairTerms, check_offer, describe_other_bits
from kv_transfer.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

STATES_TO_DIAL = (WorkerState.WARM, WorkerState.SERVING, WorkerState.DRAINING)
HELLO_TRIES = 3
PROBE_LOOK_S = 0.005
"""Pause between two looks at a probe on its way; most are back at the first look."""


@dataclass(slots=True, eq=False)
class _Pair:
    """One prefill peer. `answer` is what our last PairHello waits for; `broken` is set when the agent is destroyed."""

    party: Party
    is_up: bool = False
    is_suspect: bool = False
    answer: "asyncio.Future[PairHello | PairRefused] | None" = None
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class PrefillPairs:
    """Every prefill worker that this one may read from. On the control loop; agents live on the transfer thread."""

    def __init__(
        self,
        terms: PairTerms,
        transfers: TransferThread,
        reads: Reads,
        outside: Outside,
        network: WorkerNetwork,
        rng: random.Random,
    ) -> None:
        self._terms = terms
        self._transfers = transfers
        self._reads = reads
        self._outside = outside
        self._network = network
        self._rng = rng
        self._pairs: dict[PeerId, _Pair] = {}
        self._dialled: dict[WorkerId, WorkerAddress] = {}
        self._landing = asyncio.Lock()  # all probes land in one block

    # -- whom to know --------------------------------------------------------------------------------------------------

    def table_changed(self, table: WorkerTable) -> None:
        """Stay connected to every prefill worker of the table, and to no other."""
        wanted = {
            entry.address.worker_id: entry.address for entry in table.entries if entry.role == "prefill" and entry.state in STATES_TO_DIAL
        }
        for worker_id in self._dialled.keys() - wanted.keys():
            self._outside.forget(worker_id)
        for worker_id, address in wanted.items():
            if self._dialled.get(worker_id) != address:
                self._outside.keep(address)
        self._dialled = wanted

    def peer_up(self, party: Party) -> None:
        """Make the pair with a prefill worker that is connected now."""
        if party.kind is not PartyKind.PREFILL:
            return
        pair = self._pairs[party.peer_id] = _Pair(party)
        pair.task = asyncio.get_running_loop().create_task(self._keep_up(pair))
        pair.task.add_done_callback(self._ended)

    def peer_lost(self, party: Party) -> None:
        """Leave the pair; its READs end with its agent."""
        pair = self._pairs.pop(party.peer_id, None)
        if pair is None:
            return
        if pair.task is not None:
            pair.task.cancel()
        self._transfers.destroy(party.peer_id)
        self._reads.forget_peer(party.peer_id)
        self._outside.report()

    def receive(self, party: Party, message: PairHello | PairRefused) -> None:
        """The peer's answer to our PairHello; one that nobody waits for is an earlier one's repetition."""
        pair = self._pairs.get(party.peer_id)
        if pair is not None and pair.answer is not None and not pair.answer.done():
            pair.answer.set_result(message)

    # -- how they fare -------------------------------------------------------------------------------------------------

    def destroy(self, peer: PeerId) -> None:
        """Destroy the peer's agent, the one thing that ends its READs, and make the pair anew."""
        self._transfers.destroy(peer)
        if (pair := self._pairs.get(peer)) is not None:
            pair.broken.set()

    def suspect(self, peer: PeerId) -> None:
        """A READ takes long: the router should prefer others until one has ended."""
        self._set_suspect(peer, True)

    def trust(self, peer: PeerId) -> None:
        """A READ from the peer is DONE."""
        self._set_suspect(peer, False)

    def knows(self, peer: PeerId) -> bool:
        """Whether the peer is connected, or was a moment ago: its loss is still to be told."""
        return peer in self._pairs

    def states(self) -> tuple[PairState, ...]:
        """What the router is told."""
        return tuple(
            PairState(
                WorkerId(pair.party.party_id), pair.party.incarnation, pair.is_up and not pair.is_suspect, self._reads.bytes_per_s(peer)
            )
            for peer, pair in self._pairs.items()
        )

    async def close(self) -> None:
        """Stop making pairs."""
        tasks = [pair.task for pair in self._pairs.values() if pair.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_suspect(self, peer: PeerId, is_suspect: bool) -> None:
        pair = self._pairs.get(peer)
        if pair is not None and pair.is_suspect is not is_suspect:
            pair.is_suspect = is_suspect
            self._outside.report()

    def _set_up(self, pair: _Pair, is_up: bool) -> None:
        if pair.is_up is not is_up:
            logger.info("pair changed peer=%s up=%s", pair.party.peer_id, is_up)
        pair.is_up, pair.is_suspect = is_up, False
        self._outside.report()

    # -- making one ----------------------------------------------------------------------------------------------------

    async def _keep_up(self, pair: _Pair) -> None:
        wire = self._network.wire
        pause_s = wire.redial_min_s
        while True:
            pair.broken.clear()
            try:
                await self._make(pair)
            except LayoutMismatch as error:
                logger.error("pair refused peer=%s code=%s reason=%s", pair.party.peer_id, error.code, error.message)
                self._transfers.destroy(pair.party.peer_id)
                self._set_up(pair, False)
                return
            except TransferError as error:
                logger.warning("pair not up peer=%s next_try_s=%.2f error=%s", pair.party.peer_id, pause_s, error)
                self._transfers.destroy(pair.party.peer_id)
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, wire.redial_max_s)
                continue
            pause_s = wire.redial_min_s
            self._set_up(pair, True)
            await pair.broken.wait()
            self._set_up(pair, False)
            await asyncio.sleep(pause_s)

    async def _make(self, pair: _Pair) -> None:
        """Raises LayoutMismatch when either side refuses, and another TransferError when it may work the next time."""
        peer, incarnation = pair.party.peer_id, pair.party.incarnation
        agent = await self._transfers.call(lambda transport: transport.open_peer(peer))
        answer = await self._exchange(pair, PairHello(self._terms.offer(agent)))
        if isinstance(answer, PairRefused):
            raise LayoutMismatch(f"the peer refuses: {answer.reason}")
        offer = answer.offer
        check_offer(self._terms, offer)
        if (other_bits := describe_other_bits(self._terms, offer)) is not None:
            logger.warning("pair deterministic on each side only peer=%s reason=%s", peer, other_bits)
        await self._transfers.call(lambda transport: transport.connect_peer(peer, offer))
        async with self._landing:
            await self._probe(peer, incarnation)

    async def _probe(self, peer: PeerId, incarnation: Incarnation) -> None:
        """Raises TransferError when the bytes of the peer's probe block do not come, or are not its own."""
        within_s = self._network.timers.read_suspect_s
        try:
            async with asyncio.timeout(within_s):
                await self._transfers.call(lambda transport: transport.start_probe(peer))
                while not await self._transfers.call(lambda transport: transport.is_probe_back(peer, incarnation)):  # noqa: ASYNC110 - the transport tells nobody
                    await asyncio.sleep(PROBE_LOOK_S)
        except TimeoutError:
            raise TransferTimeout(f"the probe of {peer} did not end within {within_s} s") from None

    async def _exchange(self, pair: _Pair, hello: PairHello) -> PairHello | PairRefused:
        timeout_s = self._network.timers.repeat_s
        for _ in range(HELLO_TRIES):
            pair.answer = asyncio.get_running_loop().create_future()
            self._outside.send(pair.party.peer_id, hello)
            try:
                async with asyncio.timeout(timeout_s):
                    return await pair.answer
            except TimeoutError:
                continue
            finally:
                pair.answer = None
        raise TransferTimeout(f"no answer to PairHello, {HELLO_TRIES} times {timeout_s} s")

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outside.fault(error)
