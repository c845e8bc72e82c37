"""Blocks by NIXL over UCX: RDMA between hosts, CMA or TCP on one. The only file that imports NIXL and numpy in this package.

Rests on what was measured (docs/nixl.md): DONE means placed; an exception is not DONE; releasing a handle stops nothing; only
destroying the agent object ends a READ. So each peer has an agent of its own, with its epoch in the name. The binding is used
directly because the wheel's Python wrapper sets the progress thread's delay to zero, which spins a core.
"""

import contextlib
from dataclasses import dataclass, field

import numpy
from nixl import _bindings as binding

from kv_transfer.config import TransportConfig
from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.geometry import PoolGeometry
from kv_transfer.handoff import PostRead
from kv_transfer.identity import BlockId, Incarnation, PeerId
from kv_transfer.messages import PeerOffer
from kv_transfer.pool_memory import PoolMemory, probe_pattern
from kv_transfer.transports.base import AgentDescription, ReadOutcome

NIXL_ERRORS = (
    binding.nixlBackendError,
    binding.nixlCancelledError,
    binding.nixlInvalidParamError,
    binding.nixlMismatchError,
    binding.nixlNotAllowedError,
    binding.nixlNotFoundError,
    binding.nixlNotPostedError,
    binding.nixlNotSupportedError,
    binding.nixlRemoteDisconnectError,
    binding.nixlRepostActiveError,
    binding.nixlUnknownError,
)


def map_error(what: str, error: Exception) -> TransferError:
    """Our error for one of NIXL's."""
    kind = PeerLost if isinstance(error, binding.nixlRemoteDisconnectError) else TransferError
    return kind(f"{what}: {type(error).__name__}: {error}")


def descriptor_list(geometry: PoolGeometry) -> binding.nixlXferDList:
    """All blocks of a pool, index = block id. An array [blocks, 3] of address, length, device: tuples cost a hundred times as much."""
    return binding.nixlXferDList(binding.DRAM_SEG, numpy.array(geometry.descriptors(), dtype=numpy.uint64))


@dataclass(slots=True)
class _Agent:
    """This side's agent for one peer. `native` is the only reference to NIXL's object: dropping it destroys the agent."""

    name: str
    epoch: int
    native: binding.nixlAgent
    local_blocks: int
    remote_name: str = ""
    remote_blocks: int | None = None
    remote_probe: BlockId | None = None
    reads: dict[int, int] = field(default_factory=dict)
    raised: list[int] = field(default_factory=list)
    probe: int | None = None


class NixlTransport:
    """One process's agents. `memory` must be mapped for as long as the process lives (`PoolMemory` is)."""

    def __init__(self, me: PeerId, memory: PoolMemory, config: TransportConfig) -> None:
        self.destroying_proven = config.destroying_proven
        self._me = me
        self._memory = memory
        self._config = config
        self._geometry = PoolGeometry(base_address=memory.base_address, block_bytes=memory.block_bytes, num_blocks=memory.num_blocks)
        self._agents: dict[PeerId, _Agent] = {}
        self._epochs: dict[PeerId, int] = {}
        self._ended: list[ReadOutcome] = []

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def open_peer(self, peer: PeerId) -> AgentDescription:
        """Make this side's agent for `peer`, about 30 ms (the process's first: half a second). Raises TransferError."""
        self.destroy_peer(peer)
        epoch = self._epochs[peer] = self._epochs.get(peer, 0) + 1
        name = f"{self._me}>{peer}#{epoch}"
        try:
            native = self._make_agent(name)
            pool = numpy.array([[self._geometry.base_address, len(self._memory.buffer), 0]], dtype=numpy.uint64)
            native.registerMem(binding.nixlRegDList(binding.DRAM_SEG, pool), [])
            local_blocks = native.prepXferDlist(binding.NIXL_INIT_AGENT, descriptor_list(self._geometry), [])
            metadata = native.getLocalMD()
        except NIXL_ERRORS as error:
            raise map_error(f"no agent for {peer}", error) from error
        self._agents[peer] = _Agent(name, epoch, native, local_blocks)
        return AgentDescription(name, epoch, metadata)

    def _make_agent(self, name: str) -> binding.nixlAgent:
        config = binding.nixlAgentConfig()
        config.useProgThread = True  # a peer's READ needs our progress on every transport but CMA
        config.pthrDelay = self._config.progress_delay_us
        config.syncMode = binding.NIXL_THREAD_SYNC_STRICT
        native = binding.nixlAgent(name, config)
        native.createBackend("UCX", dict(self._config.ucx_options))
        return native

    def connect_peer(self, peer: PeerId, offer: PeerOffer) -> None:
        """Load the peer's agent and pool. Raises PeerLost when the peer cannot be reached, TransferError for a bad offer."""
        agent = self._agents.get(peer)
        if agent is None:
            raise TransferError(f"no agent was opened for {peer}")
        if offer.block_bytes != self._memory.block_bytes:
            raise TransferError(f"blocks of {offer.block_bytes} bytes of {peer} do not fit blocks of {self._memory.block_bytes}")
        if agent.reads:
            raise TransferError(f"{len(agent.reads)} READs from {peer} are in flight: destroy its agent instead of connecting it again")
        try:
            self._forget_remote(agent)
            agent.remote_name = agent.native.loadRemoteMD(offer.agent_metadata).decode()
            if agent.remote_name != offer.agent_name:
                raise TransferError(f"the metadata of {peer} is of agent {agent.remote_name}, not of {offer.agent_name}")
            remote = PoolGeometry.of_offer(offer)
            agent.remote_probe = remote.probe_block
            agent.remote_blocks = agent.native.prepXferDlist(agent.remote_name, descriptor_list(remote), [])
            agent.native.makeConnection(agent.remote_name, [])
        except NIXL_ERRORS as error:
            raise map_error(f"{peer} cannot be connected", error) from error

    def _forget_remote(self, agent: _Agent) -> None:
        if agent.remote_blocks is not None:
            agent.native.releasedDlistH(agent.remote_blocks)
            agent.remote_blocks = None
        if agent.remote_name:
            agent.native.invalidateRemoteMD(agent.remote_name)
            agent.remote_name = ""

    def start_probe(self, peer: PeerId) -> None:
        """Start to READ the peer's probe block; on one host this copies it before it returns. Raises PeerLost or TransferError."""
        agent = self._agents.get(peer)
        if agent is None or agent.remote_probe is None:
            raise PeerLost(f"{peer} is not connected")
        landing = self._memory.block(self._memory.landing_block)
        landing[:] = bytes(len(landing))
        try:
            agent.probe, _ = self._post(agent, (self._memory.landing_block,), (agent.remote_probe,))
        except NIXL_ERRORS as error:
            raise map_error(f"the probe of {peer} failed", error) from error

    def is_probe_back(self, peer: PeerId, incarnation: Incarnation) -> bool:
        """Whether the probe has landed, with the pattern of `incarnation`. Raises PeerLost or TransferError."""
        agent = self._agents.get(peer)
        if agent is None or agent.probe is None:
            raise PeerLost(f"no probe of {peer} is under way")
        try:
            if agent.native.getXferStatus(agent.probe) != binding.NIXL_SUCCESS:
                return False
            agent.native.releaseXferReq(agent.probe)
            agent.probe = None
        except NIXL_ERRORS as error:
            raise map_error(f"the probe of {peer} failed", error) from error
        landing = self._memory.block(self._memory.landing_block)
        if bytes(landing) != probe_pattern(incarnation, len(landing)):
            raise PeerLost(f"the probe block of {peer} has not the pattern of its incarnation")
        return True

    # -- READs ---------------------------------------------------------------------------------------------------------

    def post_read(self, read: PostRead) -> None:
        """Start a READ. On one host this copies the bytes before it returns."""
        agent = self._agents.get(read.peer)
        if agent is None or agent.remote_blocks is None:
            self._ended.append(ReadOutcome(read.read_id, read.peer, PeerLost(f"{read.peer} is not connected")))
            return
        try:
            handle, is_done = self._post(agent, read.local_ids, read.remote_ids)
        except NIXL_ERRORS as error:
            self._ended.append(ReadOutcome(read.read_id, read.peer, map_error(f"READ {read.read_id} from {read.peer}", error)))
            return
        agent.reads[read.read_id] = handle
        if is_done:
            self._end(read.peer, agent, read.read_id, None)

    def _post(self, agent: _Agent, local_ids: tuple[BlockId, ...], remote_ids: tuple[BlockId, ...]) -> tuple[int, bool]:
        """(handle, whether it is DONE already)."""
        local = numpy.array(local_ids, dtype=numpy.int32)
        remote = numpy.array(remote_ids, dtype=numpy.int32)
        handle = agent.native.makeXferReq(binding.NIXL_READ, agent.local_blocks, local, agent.remote_blocks, remote, b"", [], False)
        try:
            return handle, agent.native.postXferReq(handle) == binding.NIXL_SUCCESS
        except NIXL_ERRORS:
            agent.raised.append(handle)
            raise

    def poll(self) -> list[ReadOutcome]:
        """READs that have ended since the last call. Never waits for one."""
        for peer, agent in self._agents.items():
            for read_id, handle in list(agent.reads.items()):
                try:
                    is_done = agent.native.getXferStatus(handle) == binding.NIXL_SUCCESS
                except NIXL_ERRORS as error:
                    self._end(peer, agent, read_id, map_error(f"READ {read_id} from {peer}", error))
                else:
                    if is_done:
                        self._end(peer, agent, read_id, None)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, peer: PeerId, agent: _Agent, read_id: int, error: TransferError | None) -> None:
        handle = agent.reads.pop(read_id)
        if error is None:
            agent.native.releaseXferReq(handle)
        else:
            agent.raised.append(handle)
        self._ended.append(ReadOutcome(read_id, peer, error))

    def num_in_flight(self) -> int:
        """READs that poll has not told about yet."""
        return len(self._ended) + sum(len(agent.reads) for agent in self._agents.values())

    # -- ends ----------------------------------------------------------------------------------------------------------

    def destroy_peer(self, peer: PeerId) -> None:
        """End every READ from `peer`, about 10 ms. The order that was measured to hold: handles, then the agent object."""
        agent = self._agents.pop(peer, None)
        self._ended = [outcome for outcome in self._ended if outcome.peer != peer]
        if agent is None:
            return
        probe = () if agent.probe is None else (agent.probe,)
        for handle in (*agent.reads.values(), *agent.raised, *probe):
            with contextlib.suppress(*NIXL_ERRORS):  # the agent's end is the handle's
                agent.native.releaseXferReq(handle)
        del agent.native

    def close(self) -> None:
        """Destroy every agent."""
        for peer in list(self._agents):
            self.destroy_peer(peer)
