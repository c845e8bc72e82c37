"""Two ends of a transport for the conformance suite: ours here, and a remote one that can be filled, killed and started again.

NIXL's remote end is a real process; the loopback's is an object. Both are driven by the same few commands. An end of several ranks is a
`GroupTransport` over parts of the one kind or the other, NIXL's in a process each.
"""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kv_transfer.config import TransportConfig
from kv_transfer.geometry import CacheSharding, rank_incarnation, rank_peer
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId, peer_id
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import PeerOffer
from kv_transfer.pairing import PairTerms
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports.base import AgentDescription, Transport
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from kv_transfer.transports.ranks import LocalRank, RankTransport
from tests.rank_processes import RankProcess

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

    def content(self, block_id: int) -> set[int]:
        """The values of the block's bytes."""
        return set(self.memory.block(BlockId(block_id)))

    def close(self) -> None:
        self.transport.close()


class RankMemory(Protocol):
    """The pool of one rank, wherever it is."""

    def fill(self, block_id: int, value: int) -> None: ...
    def read(self, block_id: int) -> bytes: ...


class HereMemory:
    """Of a rank of this process."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def fill(self, block_id: int, value: int) -> None:
        self._memory.block(BlockId(block_id))[:] = bytes([value]) * BLOCK_BYTES

    def read(self, block_id: int) -> bytes:
        return bytes(self._memory.block(BlockId(block_id)))


class NotingGroup(GroupTransport):
    """Notes which of the ranks, which all have every block, each READ puts a block on."""

    def __init__(self, ranks: Sequence[RankTransport], sharding: CacheSharding) -> None:
        super().__init__(ranks, sharding)
        self.rank_of: dict[int, int] = {}
        self._noted = sharding

    def post_read(self, read: PostRead) -> None:
        for logical_block, block_id in enumerate(read.local_ids, start=read.first_block):
            self.rank_of[block_id] = self._noted.serving_rank(logical_block)
        super().post_read(read)


class GroupEnd(End):
    """An end of several ranks that all have every block, or of one behind a `GroupTransport`."""

    def __init__(self, ranks: Sequence[RankTransport], memories: Sequence[RankMemory]) -> None:
        sharding = CacheSharding.replicated(len(ranks))
        self.transport = self.group = NotingGroup(ranks, sharding)
        self._memories = memories
        pool = ranks[0].pool
        self._terms = PairTerms(
            layout=LAYOUT,
            weights_version="w",
            base_address=pool.base_address,
            block_bytes=BLOCK_BYTES,
            num_blocks=NUM_BLOCKS,
            sharding=sharding,
        )

    def open(self, peer: PeerId) -> PeerOffer:
        return self._terms.offer(self.transport.open_peer(peer))

    def fill(self, block_id: int, value: int) -> None:
        self.group.rank_of.pop(block_id, None)
        for memory in self._memories:
            memory.fill(block_id, value)

    def content(self, block_id: int) -> set[int]:
        """Of a block that was read: where it was read to; of another: on all ranks."""
        rank = self.group.rank_of.get(block_id)
        memories = self._memories if rank is None else [self._memories[rank]]
        return {value for memory in memories for value in memory.read(block_id)}


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


def make_loopback_group(fabric: LoopbackFabric, worker: PeerId, incarnation: Incarnation, num_ranks: int) -> tuple[GroupEnd, list[Any]]:
    """The end and its ranks' transports."""
    memories = [PoolMemory(NUM_BLOCKS, BLOCK_BYTES) for _ in range(num_ranks)]
    parts = [LoopbackTransport(fabric, rank_peer(worker, rank), memory, num_components=2) for rank, memory in enumerate(memories)]
    for rank, memory in enumerate(memories):
        memory.write_probe(rank_incarnation(incarnation, rank))
    ranks = [LocalRank(part, memory) for part, memory in zip(parts, memories, strict=True)]
    return GroupEnd(ranks, [HereMemory(memory) for memory in memories]), parts


class LoopbackGroupRemote(GroupEnd):
    def __init__(self, fabric: LoopbackFabric, incarnation: int, num_ranks: int) -> None:
        self.me = peer_id("prefill-0", Incarnation(incarnation))
        end, self._parts = make_loopback_group(fabric, self.me, Incarnation(incarnation), num_ranks)
        self.__dict__.update(end.__dict__)

    def kill(self) -> None:
        for part in self._parts:
            part.die()


class LoopbackGroupWorld:
    def __init__(self, num_readers: int, num_remotes: int) -> None:
        self.fabric = LoopbackFabric(step_s=0.004, seed=1)
        self._num_readers = num_readers
        self._num_remotes = num_remotes

    def reader(self) -> End:
        end, _ = make_loopback_group(self.fabric, READER, Incarnation(0xD), self._num_readers)
        return end

    def remote(self, incarnation: int) -> Remote:
        return LoopbackGroupRemote(self.fabric, incarnation, self._num_remotes)

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


def make_rank_process(party: str, incarnation: int, rank: int, options: tuple[tuple[str, str], ...]) -> RankProcess:
    return RankProcess(party, Incarnation(incarnation), rank, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, options=options)


class NixlGroupRemote(GroupEnd):
    """Two ranks, each in a process of its own."""

    def __init__(self, incarnation: int, options: tuple[tuple[str, str], ...]) -> None:
        self.me = peer_id("prefill-0", Incarnation(incarnation))
        self.processes = [make_rank_process("prefill-0", incarnation, rank, options) for rank in range(2)]
        super().__init__([process.transport for process in self.processes], self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


class NixlGroupWorld:
    """Readers and remotes of two ranks; a reader's rank 0 is this process, as in a worker."""

    def __init__(self, options: tuple[tuple[str, str], ...] = ()) -> None:
        self._options = options
        self._processes: list[RankProcess] = []
        self._readers: list[End] = []

    def reader(self) -> End:
        first = make_nixl_end(0xD, "decode-0", self._options)
        second = make_rank_process("decode-0", 0xD, 1, self._options)
        ranks = [LocalRank(first.transport, first.memory), second.transport]
        end = GroupEnd(ranks, [HereMemory(first.memory), second])
        self._processes.append(second)
        self._readers.append(end)
        return end

    def remote(self, incarnation: int) -> Remote:
        remote = NixlGroupRemote(incarnation, self._options)
        self._processes += remote.processes
        return remote

    def close(self) -> None:
        for end in self._readers:
            end.close()
        for process in self._processes:
            process.stop()
