"""HandoffPair: a source, a sink, and a wire between them that you can bend.

Real sessions and pools, bytes over the loopback fabric, time by hand. Messages wait on the wire until they are delivered, dropped,
repeated or overtaken; READs land piece by piece. The workers are the least that use a session as a worker must: the source
computes chunk by chunk under step holders, and what it stores is a function of *all* tokens before, so one wrong byte shows.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import EXCHANGE, BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_peer
from kv_transfer.handoff import (
    RECORD_SCHEMA,
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
from kv_transfer.identity import (
    BlockId,
    Incarnation,
    PackedTokens,
    PeerId,
    RequestId,
    TransferId,
    WorkerId,
    count_tokens,
    pack_tokens,
    peer_id,
)
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import HandoffRecord, Message, OpenSink, SamplingParameters, StartSource, WorkerAddress
from kv_transfer.pairing import PairTerms
from kv_transfer.pool_memory import NUM_PROBE_BLOCKS, PoolMemory
from kv_transfer.sink_session import SinkSession
from kv_transfer.source_session import SourceSession
from kv_transfer.transports.base import Transport
from kv_transfer.transports.group import GroupTransport
from kv_transfer.transports.loopback import CALM, FaultPlan, LoopbackFabric, LoopbackTransport
from kv_transfer.transports.ranks import LocalRank

BLOCK_SIZE = 4
NUM_COMPONENTS = 2
COMPONENT_BYTES = 64
BLOCK_BYTES = NUM_COMPONENTS * COMPONENT_BYTES
LAYOUT = CacheLayout(
    BLOCK_SIZE,
    (
        CacheComponent("latent", (0,), COMPONENT_BYTES // BLOCK_SIZE, "test"),
        CacheComponent("index", (0,), COMPONENT_BYTES // BLOCK_SIZE, "test"),
    ),
    "model",
    "tokenizer",
)
ROUTER = peer_id("gateway-0", Incarnation(0x6))
SALT = b"salt"
TIMERS = ProtocolTimers()


def component_bytes(tokens: PackedTokens, block: int, component: int) -> bytes:
    """What one component of a block holds: every byte depends on all tokens up to the block's last."""
    end = min((block + 1) * BLOCK_SIZE, count_tokens(tokens)) * 4
    return (hashlib.sha256(bytes([component]) + tokens[:end]).digest() * 2)[:COMPONENT_BYTES]


def block_bytes(tokens: PackedTokens, block: int) -> bytes:
    """What a block holds."""
    return b"".join(component_bytes(tokens, block, component) for component in range(NUM_COMPONENTS))


def party_of(peer: PeerId) -> str:
    """The name without the start."""
    return peer.partition("@")[0]


@dataclass
class Step:
    """A launched step of the source: computes tokens [start, end), one component store at a time, then completes."""

    number: int
    transfer: TransferId
    start: int
    end: int
    block_ids: list[BlockId]
    touched: list[BlockId]
    num_stored: int = 0


@dataclass
class SourceSequence:
    """What the source's worker knows of a transfer."""

    message: StartSource
    num_computed: int = 0
    num_sealed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    is_admitted: bool = False


class SmallMemory(PoolMemory):
    """A pool's bytes on the Python heap: thousands of pairs are made, and a real mapping is never given back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = BLOCK_BYTES
        self.base_address = 0
        self.buffer = memoryview(bytearray((num_blocks + NUM_PROBE_BLOCKS) * BLOCK_BYTES))


def views_of(memories: list[SmallMemory], sharding: CacheSharding, block_id: BlockId) -> list[memoryview]:
    """A block's bytes on every rank that has it."""
    return [memories[rank].block(sharding.local_id(block_id)) for rank in sharding.ranks(block_id)]


class HandoffPair:
    """Both ends of hand-offs from one source to one sink."""

    def __init__(
        self,
        *,
        num_source_blocks: int = 16,
        num_sink_blocks: int = 16,
        chunk_tokens: int = 8,
        timers: ProtocolTimers = TIMERS,
        plan: FaultPlan = CALM,
        seed: int = 0,
        source_type: type[SourceSession] = SourceSession,
        sink_type: type[SinkSession] = SinkSession,
        source_sharding: CacheSharding = ONE_RANK,
        sink_sharding: CacheSharding = ONE_RANK,
    ) -> None:
        """Blocks are counted over all homes of a side."""
        self.now_s = 0.0
        self.source_sharding = source_sharding
        self.sink_sharding = sink_sharding
        self.timers = timers
        self.chunk_tokens = chunk_tokens
        self.source_type = source_type
        self.sink_type = sink_type
        self.fabric = LoopbackFabric(plan, seed)
        self.wire: list[tuple[PeerId, PeerId, Message]] = []
        self.to_router: list[Message] = []
        self.events: list[Effect] = []
        self.dropped: dict[tuple[str, TransferId], Dropped] = {}
        self.num_sink_blocks = num_sink_blocks
        self.num_source_blocks = num_source_blocks
        self.num_starts = 0
        self.opened: dict[TransferId, OpenSink] = {}
        self.start_source_process()
        self.start_sink_process()

    # -- processes -----------------------------------------------------------------------------------------------------

    def start_source_process(self) -> None:
        """A new process under the source's name: new incarnation, empty pool, nothing remembered."""
        if self.num_starts:
            for part in self.source_parts:
                part.die()
        self.num_starts += 1
        self.source_incarnation = Incarnation(0x1000 + self.num_starts)
        self.source_peer = peer_id("prefill-0", self.source_incarnation)
        sharding = self.source_sharding
        self.source_pool = BlockPool(self.num_source_blocks, BLOCK_SIZE, sharding.num_homes)
        self.source = self.source_type(self.source_pool, self.source_incarnation, self.timers, LAYOUT.component_mask, sharding)
        self.source_memories = [SmallMemory(self.num_source_blocks // sharding.num_homes) for _ in range(sharding.num_ranks)]
        self.source_memory = self.source_memories[0]
        self.source_parts = self.make_parts(self.source_peer, self.source_memories, sharding, lambda _block_id: None)
        self.source_transport = self.make_transport(self.source_parts, sharding)
        self.sequences: dict[TransferId, SourceSequence] = {}
        self.steps: list[Step] = []
        self.num_steps = 0
        if hasattr(self, "sink"):
            self.connect()

    def start_sink_process(self) -> None:
        """A new process under the sink's name."""
        if hasattr(self, "sink"):
            for part in self.sink_parts:
                part.die()
        self.num_starts += 1
        self.sink_incarnation = Incarnation(0x2000 + self.num_starts)
        self.sink_peer = peer_id("decode-0", self.sink_incarnation)
        sharding = self.sink_sharding
        self.sink_pool = BlockPool(self.num_sink_blocks, BLOCK_SIZE, sharding.num_homes)
        self.sink = self.sink_type(
            self.sink_pool, self.sink_incarnation, self.timers, LAYOUT, self.fabric.plan.destroying_proven, sharding=sharding
        )
        self.sink_memories = [SmallMemory(self.num_sink_blocks // sharding.num_homes) for _ in range(sharding.num_ranks)]
        self.sink_memory = self.sink_memories[0]
        self.sink_parts = self.make_parts(self.sink_peer, self.sink_memories, sharding, self.owner_of_sink_block)
        self.sink_transport = self.make_transport(self.sink_parts, sharding)
        self.to_share: list[ShareBlocks] = []
        self.ready: set[TransferId] = set()
        self.reads: dict[int, PostRead] = {}
        self.connect()

    def make_parts(
        self, peer: PeerId, memories: list[SmallMemory], sharding: CacheSharding, owner_of: Callable[[BlockId], Hashable]
    ) -> list[LoopbackTransport]:
        """The transports of a side's ranks. owner_of: of group-wide ids."""

        def owner_on(rank: int) -> Callable[[BlockId], Hashable]:
            return lambda local_id: owner_of(sharding.group_id(rank % sharding.num_homes, local_id))

        return [
            LoopbackTransport(self.fabric, rank_peer(peer, rank), memory, num_components=NUM_COMPONENTS, owner_of=owner_on(rank))
            for rank, memory in enumerate(memories)
        ]

    def make_transport(self, parts: list[LoopbackTransport], sharding: CacheSharding) -> Transport:
        """What a side's sessions see; plain where nobody has several ranks."""
        if self.source_sharding == self.sink_sharding == ONE_RANK:
            return parts[0]
        return GroupTransport([LocalRank(part, part.memory) for part in parts], sharding)

    def owner_of_sink_block(self, block_id: BlockId) -> object:
        """A piece in flight must find its block in the same use, and not free."""
        return self.sink_pool.generation(block_id), bool(self.sink_pool.holders(block_id))

    def connect(self) -> None:
        """Make the pair's agents, as PairHello does."""
        terms = PairTerms.of_pool(LAYOUT, "w", self.source_memory, sharding=self.source_sharding)
        offer = terms.offer(self.source_transport.open_peer(self.sink_peer))
        self.sink_transport.open_peer(self.source_peer)
        self.sink_transport.connect_peer(self.source_peer, offer)

    # -- the router's part ---------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: Iterable[int],
        *,
        request: str = "r",
        attempt: int = 1,
        local: bool = False,
        first_index: int = 0,
        deadline_s: float = 1000.0,
        max_tokens: int = 4,
    ) -> TransferId:
        """OPEN_SINK of a new transfer, delivered at once."""
        source_incarnation = Incarnation(0) if local else self.source_incarnation
        transfer = TransferId(RequestId(request), attempt, source_incarnation, self.sink_incarnation)
        packed = pack_tokens(tokens)
        address = None if local else WorkerAddress(WorkerId("prefill-0"), self.source_incarnation, "", 0)
        sampling = SamplingParameters(max_tokens=max_tokens, seed=1)
        self.opened[transfer] = OpenSink(transfer, packed, count_tokens(packed), first_index, SALT, sampling, 0, deadline_s, address)
        self.open_again(transfer)
        return transfer

    def open_again(self, transfer: TransferId) -> None:
        """OPEN_SINK, repeated."""
        message = self.opened[transfer]
        source = None if message.source is None else self.source_peer
        self.do("sink", self.sink.open(message, ROUTER, source, self.now_s))

    def start(self, transfer: TransferId, need_from: int | None = None) -> bool:
        """START_SOURCE, delivered at once; the answer of OPEN_SINK says from where. Returns whether a sequence was queued."""
        opened = self.opened[transfer]
        if need_from is None:
            need_from = self.sink.have_tokens(transfer) if self.sink.is_live(transfer) else 0
        address = WorkerAddress(WorkerId("decode-0"), transfer.sink_incarnation, "", 0)
        message = StartSource(
            transfer,
            opened.tokens,
            opened.num_prompt_tokens,
            opened.first_index,
            need_from,
            SALT,
            opened.sampling,
            0,
            opened.deadline_s,
            address,
        )
        is_new, effects = self.source.start(message, ROUTER, peer_id("decode-0", transfer.sink_incarnation), self.now_s)
        if is_new:
            self.sequences[transfer] = SourceSequence(message)
        self.do("source", effects)
        return is_new

    def tell(self, side: str, message: Message) -> None:
        """A message of the router, delivered at once."""
        session = self.source if side == "source" else self.sink
        self.do(side, session.receive(ROUTER, message, self.now_s))

    # -- the source's worker -------------------------------------------------------------------------------------------

    def launch(self, transfer: TransferId) -> bool:
        """Launch the step of the next chunk; False when there is none, or no room."""
        sequence = self.sequences.get(transfer)
        if sequence is None or any(step.transfer == transfer for step in self.steps):
            return False
        tokens = sequence.message.tokens
        num_tokens = count_tokens(tokens)
        if sequence.num_computed == num_tokens:
            return False
        holder = Holder(HolderKind.COMPUTE, transfer)
        if not sequence.is_admitted:
            keys = block_keys(tokens, SALT, BLOCK_SIZE, False)[: (num_tokens - 1) // BLOCK_SIZE]
            if -(-num_tokens // BLOCK_SIZE) > self.source_pool.num_available + len(self.source_pool.lookup(keys)):
                return False
            sequence.blocks = self.source_pool.pin(keys, holder)
            sequence.num_computed = len(sequence.blocks) * BLOCK_SIZE
            sequence.is_admitted = True
            self.do("source", self.source.computing(transfer, self.now_s))
        start, end = sequence.num_computed, min(sequence.num_computed + self.chunk_tokens, num_tokens)
        needed = -(-end // BLOCK_SIZE) - len(sequence.blocks)
        if needed > self.source_pool.num_available:
            return False
        sequence.blocks += self.source_pool.allocate(needed, holder, len(sequence.blocks))
        touched = list(sequence.blocks)
        self.num_steps += 1
        self.source_pool.hold(touched, Holder(HolderKind.STEP, self.num_steps))
        self.steps.append(Step(self.num_steps, transfer, start, end, sequence.blocks[start // BLOCK_SIZE :], touched))
        return True

    def store(self, step: Step) -> bool:
        """One component of one block of a launched step; False when all are stored."""
        sequence_tokens = self.opened[step.transfer].tokens[: step.end * 4]
        place, component = divmod(step.num_stored, NUM_COMPONENTS)
        if place == len(step.block_ids):
            return False
        block = step.start // BLOCK_SIZE + place
        stored = component_bytes(PackedTokens(sequence_tokens), block, component)
        for view in views_of(self.source_memories, self.source_sharding, step.block_ids[place]):
            view[component * COMPONENT_BYTES : (component + 1) * COMPONENT_BYTES] = stored
        step.num_stored += 1
        return True

    def has_right_prefix(self, step: Step) -> bool:
        """Whether the blocks that the step attends to hold what they should: what it stores depends on them."""
        tokens = self.opened[step.transfer].tokens
        for block in range(step.start // BLOCK_SIZE):
            views = views_of(self.source_memories, self.source_sharding, step.touched[block])
            if any(bytes(view) != block_bytes(tokens, block) for view in views):
                return False
        return True

    def complete(self, step: Step, *, record_index: int | None = None) -> None:
        """The step's last store is done: publish, seal, and after the last chunk complete."""
        while self.store(step):
            pass
        self.steps.remove(step)
        sequence = self.sequences.get(step.transfer)
        if sequence is not None and self.source.is_live(step.transfer):
            self._publish(sequence, step)
            sequence.num_computed = step.end
            start, sequence.num_sealed = sequence.num_sealed, step.end  # what was cached is sealed with the first chunk
            ids = tuple(sequence.blocks[start // BLOCK_SIZE : -(-step.end // BLOCK_SIZE)])
            self.source.progress(step.transfer, step.end, 0)
            self.do("source", self.source.seal(step.transfer, start, step.end, ids, self.now_s))
            if step.end == count_tokens(sequence.message.tokens):
                index = sequence.message.first_index if record_index is None else record_index
                record = HandoffRecord(RECORD_SCHEMA, index, 42, None, 1, 0)
                self.do("source", self.source.complete(step.transfer, record, self.now_s))
        self.source_pool.release(step.touched, Holder(HolderKind.STEP, step.number))

    def _publish(self, sequence: SourceSequence, step: Step) -> None:
        keys = block_keys(sequence.message.tokens, SALT, BLOCK_SIZE, False)
        for block in range(step.start // BLOCK_SIZE, step.end // BLOCK_SIZE):
            self.source_pool.publish(sequence.blocks[block], keys[block])

    def compute(self, transfer: TransferId, num_chunks: int = 1000) -> None:
        """Run whole steps."""
        for _ in range(num_chunks):
            if not self.launch(transfer):
                return
            self.complete(self.steps[-1])

    # -- carrying out effects ------------------------------------------------------------------------------------------

    def do(self, side: str, effects: list[Effect]) -> None:
        """What a worker does with the effects of its session."""
        me = self.source_peer if side == "source" else self.sink_peer
        for effect in effects:
            self.events.append(effect)
            if isinstance(effect, Send):
                if effect.peer == ROUTER:
                    self.to_router.append(effect.message)
                else:
                    self.wire.append((me, effect.peer, effect.message))
            elif isinstance(effect, PostRead):
                self.reads[effect.read_id] = effect
                self.sink_transport.post_read(effect)
            elif isinstance(effect, DestroyAgent):
                self.sink_transport.destroy_peer(effect.peer)
                self.reads = {read_id: read for read_id, read in self.reads.items() if read.peer != effect.peer}
                self.do("sink", self.sink.agent_destroyed(effect.peer, self.now_s))
                if effect.peer == self.source_peer:
                    self.connect()
            elif isinstance(effect, Dropped):
                assert (side, effect.transfer) not in self.dropped, f"{effect.transfer} was dropped twice"
                self.dropped[side, effect.transfer] = effect
                if side == "source":
                    self.sequences.pop(effect.transfer, None)
                else:
                    self.ready.discard(effect.transfer)
            elif isinstance(effect, Ready):
                self.check_content(effect.transfer)
                self.ready.add(effect.transfer)
            elif isinstance(effect, ShareBlocks):
                self.to_share.append(effect)
            else:
                assert isinstance(effect, RecordArrived | FillLocally | SuspectPeer)

    def check_content(self, transfer: TransferId) -> None:
        """Every byte of the sink's table is what the tokens say (I2, I11): on the rank that read it, and after a step on all."""
        tokens = self.opened[transfer].tokens
        table = self.sink.block_table(transfer)
        for is_shared in (False, True):
            for block in range(-(-count_tokens(tokens) // BLOCK_SIZE)):
                ranks = self.sink_sharding.ranks(table[block]) if is_shared else (self.sink_sharding.serving_rank(block),)
                for rank in ranks:
                    view = self.sink_memories[rank].block(self.sink_sharding.local_id(table[block]))
                    assert bytes(view) == block_bytes(tokens, block), f"block {block} of {transfer} holds foreign bytes on rank {rank}"
            self.share()

    def share(self) -> None:
        """What the next step of the sink begins with: ranks that have the same block copy it from the one that read it."""
        for effect in self.to_share:
            for block_id, rank in effect.copies:
                read = bytes(self.sink_memories[rank].block(self.sink_sharding.local_id(block_id)))
                for view in views_of(self.sink_memories, self.sink_sharding, block_id):
                    view[:] = read
                self.sink_pool.release([block_id], EXCHANGE)
        self.to_share.clear()

    # -- the wire ------------------------------------------------------------------------------------------------------

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Deliver one message; with `keep` it stays on the wire, to be delivered again. It reaches whoever has the name now."""
        sender, receiver, message = self.wire[index] if keep else self.wire.pop(index)
        if party_of(receiver) == party_of(self.source_peer):
            self.do("source", self.source.receive(sender, message, self.now_s))
        else:
            self.do("sink", self.sink.receive(sender, message, self.now_s))

    def on_wire(self, kind: type) -> list[int]:
        """Where messages of this kind wait."""
        return [index for index, (_, _, message) in enumerate(self.wire) if isinstance(message, kind)]

    def drop(self, kind: type) -> int:
        """Lose every waiting message of this kind; how many there were."""
        lost = self.on_wire(kind)
        self.wire = [entry for index, entry in enumerate(self.wire) if index not in lost]
        return len(lost)

    def poll_reads(self) -> bool:
        """Tell the sink which READs have ended; whether any had."""
        outcomes = self.sink_transport.poll()
        for outcome in outcomes:
            self.reads.pop(outcome.read_id, None)
            if outcome.error is None:
                self.do("sink", self.sink.read_done(outcome.read_id, self.now_s))
            else:
                self.do("sink", self.sink.read_failed(outcome.read_id, outcome.error, self.now_s))
        return bool(outcomes)

    def deliver_all(self) -> None:
        """Deliver messages until the wire is silent; no bytes land."""
        while self.wire:
            self.deliver()

    def land_all(self) -> None:
        """Every piece that is not held up lands."""
        self.fabric.advance(self.fabric.plan.max_delay_s)

    def settle(self) -> None:
        """Messages and bytes move until nothing does."""
        moved = True
        while moved:
            self.deliver_all()
            self.land_all()
            moved = self.poll_reads() or bool(self.wire)

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        """Let time pass, with ticks on both sides; nothing is delivered."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + step_s, end_s)
            self.tick()

    def tick(self) -> None:
        """Both sides look at their timers."""
        self.do("source", self.source.tick(self.now_s))
        self.do("sink", self.sink.tick(self.now_s))

    # -- what should hold ----------------------------------------------------------------------------------------------

    def router_heard(self, kind: type[Message]) -> list[Message]:
        """Messages of this kind that the router got."""
        return [message for message in self.to_router if isinstance(message, kind)]

    def assert_no_leaks(self) -> None:
        """Nobody but the cache and the quarantine holds a block, and nothing is promised (I6)."""
        self.share()
        assert self.source_pool.audit().is_quiesced, self.source_pool.audit()
        assert self.sink_pool.audit().is_quiesced, self.sink_pool.audit()
        assert self.sink.num_reserved_blocks == 0
        assert self.source.num_live == self.sink.num_live == 0
        assert self.fabric.foreign_bytes == []
