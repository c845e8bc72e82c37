"""The prefill side of pairs: answers a decode worker's PairHello with an agent of its own for that peer, or says why not.

Knows: one agent per peer and epoch. Does not know READs: they are the other side's, and this side only lets them happen.
"""

import asyncio
import logging
from dataclasses import dataclass

from glm_runtime.engine.worker_role import Outside
from kv_transfer.errors import TransferError
from kv_transfer.identity import PeerId
from kv_transfer.link import Party
from kv_transfer.messages import PairHello, PairRefused, PeerOffer
from kv_transfer.pairing import PairTerms, check_offer
from kv_transfer.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What one agent of a peer was answered; None while our agent is being made."""

    agent_name: str
    agent_epoch: int
    hello: PairHello | None


class DecodePairs:
    """Every decode worker that wants to read from here. On the control loop; agents are made on the transfer thread."""

    def __init__(self, terms: PairTerms, transfers: TransferThread, outside: Outside) -> None:
        self._terms = terms
        self._transfers = transfers
        self._outside = outside
        self._answers: dict[PeerId, _Answer] = {}
        self._refusals: dict[PeerId, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, party: Party, message: PairHello) -> None:
        """Answer a new agent of the peer with a new agent of ours, and a repeated message with the same answer."""
        peer, offer = party.peer_id, message.offer
        try:
            check_offer(self._terms, offer)
        except TransferError as error:
            self._refuse(peer, error)
            return
        known = self._answers.get(peer)
        if known is None or (known.agent_name, known.agent_epoch) != (offer.agent_name, offer.agent_epoch):
            self._answers[peer] = _Answer(agent_name=offer.agent_name, agent_epoch=offer.agent_epoch, hello=None)
            task = asyncio.get_running_loop().create_task(self._make_agent(peer, offer))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        elif known.hello is not None:
            self._outside.send(peer, known.hello)

    def peer_lost(self, party: Party) -> None:
        """Destroy the agent of a peer that is gone."""
        self._refusals.pop(party.peer_id, None)
        if self._answers.pop(party.peer_id, None) is not None:
            self._transfers.destroy(party.peer_id)

    @property
    def num_pairs(self) -> int:
        """Peers that have been answered."""
        return len(self._answers)

    def _refuse(self, peer: PeerId, error: TransferError) -> None:
        if self._refusals.get(peer) != error.message:
            self._refusals[peer] = error.message
            logger.error("pair refused peer=%s code=%s reason=%s", peer, error.code, error.message)
        self._outside.send(peer, PairRefused(error.code, error.message))

    async def _make_agent(self, peer: PeerId, offer: PeerOffer) -> None:
        try:
            agent = await self._transfers.call(lambda transport: transport.open_peer(peer))
        except TransferError as error:
            logger.warning("no agent for a pair peer=%s epoch=%d error=%s", peer, offer.agent_epoch, error)
            self._answers.pop(peer, None)
            return
        known = self._answers.get(peer)
        if known is None:
            self._transfers.destroy(peer)  # lost while its agent was being made
        elif (known.agent_name, known.agent_epoch) == (offer.agent_name, offer.agent_epoch):
            hello = PairHello(self._terms.offer(agent))
            self._answers[peer] = _Answer(agent_name=offer.agent_name, agent_epoch=offer.agent_epoch, hello=hello)
            logger.info("pair answered peer=%s epoch=%d", peer, offer.agent_epoch)
            self._outside.send(peer, hello)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outside.fault(error)
