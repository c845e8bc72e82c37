"""Two ends of a transport for the conformance suite: ours here, and a remote one that can be filled, killed and started again.

NIXL's remote end is a real process; the loopback's is an object. Both are driven by the same few commands.
"""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kv_transfer.config import TransportConfig
from kv_transfer.identity import BlockId, Incarnation, PeerId, peer_id
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import PeerOffer
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import AgentDescription, Transport
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport

NUM_BLOCKS = 32
BLOCK_BYTES = 262144
LAYOUT = CacheLayout(4, (CacheComponent("latent", (0, 1), 32768, "test"),), "model", "tokenizer")
READER = peer_id("decode-0", Incarnation(0xD))


def make_offer(memory: PoolMemory, agent: AgentDescription) -> PeerOffer:
    """What this end says about itself in PairHello."""
    return PeerOffer(
        LAYOUT.fingerprint, LAYOUT, "w", 1, agent.name, agent.epoch, agent.metadata, memory.base_address, BLOCK_BYTES, NUM_BLOCKS
    )


class End:
    """One end: a pool and a transport."""

    def __init__(self, transport: Transport, memory: PoolMemory, incarnation: Incarnation) -> None:
        self.transport = transport
        self.memory = memory
        memory.write_probe(incarnation)

    def open(self, peer: PeerId) -> PeerOffer:
        return make_offer(self.memory, self.transport.open_peer(peer))

    def connect(self, peer: PeerId, offer: PeerOffer) -> None:
        self.transport.connect_peer(peer, offer)

    def fill(self, block_id: int, value: int) -> None:
        self.memory.block(BlockId(block_id))[:] = bytes([value]) * BLOCK_BYTES

    def close(self) -> None:
        self.transport.close()


class Remote(Protocol):
    """The end that is read from."""

    me: PeerId

    def open(self, peer: PeerId) -> PeerOffer: ...
    def connect(self, peer: PeerId, offer: PeerOffer) -> None: ...
    def fill(self, block_id: int, value: int) -> None: ...
    def kill(self) -> None: ...


class World(Protocol):
    """Makes ends of one kind of transport."""

    def reader(self) -> End: ...
    def remote(self, incarnation: int) -> Remote: ...
    def close(self) -> None: ...


# -- loopback ----------------------------------------------------------------------------------------------------------


class LoopbackRemote(End):
    def __init__(self, fabric: LoopbackFabric, incarnation: int) -> None:
        self.me = peer_id("prefill-0", Incarnation(incarnation))
        memory = PoolMemory(NUM_BLOCKS, BLOCK_BYTES)
        self._loopback = LoopbackTransport(fabric, self.me, memory, num_components=2)
        super().__init__(self._loopback, memory, Incarnation(incarnation))

    def kill(self) -> None:
        self._loopback.die()


class LoopbackWorld:
    def __init__(self) -> None:
        self.fabric = LoopbackFabric(step_s=0.004, seed=1)

    def reader(self) -> End:
        memory = PoolMemory(NUM_BLOCKS, BLOCK_BYTES)
        return End(LoopbackTransport(self.fabric, READER, memory, num_components=2), memory, Incarnation(0xD))

    def remote(self, incarnation: int) -> Remote:
        return LoopbackRemote(self.fabric, incarnation)

    def close(self) -> None:
        assert self.fabric.foreign_bytes == []


# -- NIXL --------------------------------------------------------------------------------------------------------------


def make_nixl_end(incarnation: int, party: str, options: tuple[tuple[str, str], ...]) -> End:
    from kv_transfer.transports.nixl import NixlTransport

    memory = PoolMemory(NUM_BLOCKS, BLOCK_BYTES)
    transport = NixlTransport(peer_id(party, Incarnation(incarnation)), memory, TransportConfig(ucx_options=options))
    return End(transport, memory, Incarnation(incarnation))


def serve_nixl_end(pipe: Connection, incarnation: int, options: tuple[tuple[str, str], ...]) -> None:
    """The remote process: carries out commands until the pipe closes."""
    end = make_nixl_end(incarnation, "prefill-0", options)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(end, method)(*arguments))


class NixlRemote:
    def __init__(self, incarnation: int, options: tuple[tuple[str, str], ...]) -> None:
        self.me = peer_id("prefill-0", Incarnation(incarnation))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_nixl_end, args=(theirs, incarnation, options), daemon=True)
        self._process.start()
        theirs.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(60):
            raise TimeoutError(f"the remote end did not answer {method}")
        return self._pipe.recv()

    def open(self, peer: PeerId) -> PeerOffer:
        offer: PeerOffer = self._ask("open", peer)
        return offer

    def connect(self, peer: PeerId, offer: PeerOffer) -> None:
        self._ask("connect", peer, offer)

    def fill(self, block_id: int, value: int) -> None:
        self._ask("fill", block_id, value)

    def kill(self) -> None:
        """SIGKILL, and wait for the kernel to have taken the process away."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._pipe.close()

    def stop(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._process.close()


class NixlWorld:
    def __init__(self, options: tuple[tuple[str, str], ...] = ()) -> None:
        self._options = options
        self._remotes: list[NixlRemote] = []
        self._readers: list[End] = []

    def reader(self) -> End:
        end = make_nixl_end(0xD, "decode-0", self._options)
        self._readers.append(end)
        return end

    def remote(self, incarnation: int) -> Remote:
        remote = NixlRemote(incarnation, self._options)
        self._remotes.append(remote)
        return remote

    def close(self) -> None:
        for end in self._readers:
            end.close()
        for remote in self._remotes:
            remote.stop()
