"""A small closed world around the *real* sessions, hand-offs and pools, for exhaustive exploration.

One source, one sink, foreign users of the pools on both sides, a network that loses, repeats and delays, READs whose bytes land
component by component, agents that are destroyed. Time does not pass: each timer is a move that may come at any moment.
The checks look at bytes, holders and ends that can be reached, never at the rule itself (after shared model_check of the design).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kv_transfer.attempt_memory import AttemptMemory
from kv_transfer.block_keys import block_keys
from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import PeerLost
from kv_transfer.handoff import RECORD_SCHEMA, BlockState, DestroyAgent, Dropped, Effect, PostRead, Ready, Send, SinkState
from kv_transfer.identity import BlockId, Incarnation, RequestId, TransferId, WorkerId, pack_tokens, peer_id
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import (
    Cancel,
    Closed,
    Complete,
    Failed,
    Gone,
    HandoffRecord,
    Keep,
    Message,
    OpenSink,
    Progress,
    Resend,
    SamplingParameters,
    Seal,
    SinkReady,
    Stale,
    StartSource,
    Taken,
    Valid,
    Validate,
    WorkerAddress,
)
from kv_transfer.sink_handoff import SinkChunk, SinkHandoff
from kv_transfer.sink_session import SinkSession
from kv_transfer.sink_space import SinkSpace
from kv_transfer.source_handoff import SourceHandoff
from kv_transfer.source_session import SourceSession
from tests.property.explorer import DAMAGE, NORMAL, PATIENCE, Codec, Move, Shape, Violation

LAYOUT = CacheLayout(1, (CacheComponent("latent", (0,), 64, "x"), CacheComponent("index", (0,), 64, "x")), "m", "t")
SOURCE_INCARNATION, SINK_INCARNATION = Incarnation(1), Incarnation(2)
SOURCE, SINK, ROUTER = peer_id("p", SOURCE_INCARNATION), peer_id("d", SINK_INCARNATION), peer_id("g", Incarnation(3))
AT_ONCE = (Validate, Valid, Stale, Resend, Complete, Gone)
"""On a network that loses nothing these arrive at once: validation's messages are what the lossy settings are about."""
STRANGER = Holder(HolderKind.REQUEST, "stranger")
CHUNK_STEP = Holder(HolderKind.STEP, 1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is in the world and what may happen; sessions may be subclasses with a rule taken away."""

    num_chunks: int = 1
    source_blocks: int = 1
    sink_blocks: int = 1
    attempts: int = 1
    foreign_uses: int = 1
    has_sink_stranger: bool = False
    computes_again: int = 0
    max_reads: int = 2
    is_lossy: bool = True
    aborts: bool = True
    splits_steps: bool = False
    destroys: int = 0
    is_proven: bool = True
    decodes: bool = False
    done_needs_all_components: bool = True
    source_type: type[SourceSession] = SourceSession
    sink_type: type[SinkSession] = SinkSession
    pool_type: type[BlockPool] = BlockPool
    never_dead: frozenset[type] = frozenset()

    @property
    def timers(self) -> ProtocolTimers:
        return ProtocolTimers(max_reads_per_chunk=self.max_reads)


@dataclass
class Flight:
    """A READ whose bytes may still land: what has landed, as (place, component)."""

    read_id: int
    local_ids: tuple[BlockId, ...]
    remote_ids: tuple[BlockId, ...]
    generations: tuple[int, ...]
    landed: tuple[tuple[int, int], ...] = ()
    is_orphan: bool = False

    def missing(self) -> list[tuple[int, int]]:
        return [(place, component) for place in range(len(self.local_ids)) for component in (0, 1) if (place, component) not in self.landed]


@dataclass
class Sequence:
    """The source worker's view of one attempt."""

    blocks: list[BlockId] = field(default_factory=list)
    num_sealed: int = 0
    is_admitted: bool = False


class Step(NamedTuple):
    """A launched step of the source: it stores into the last of `block_ids` and reads the others."""

    attempt: int
    chunk: int
    block_ids: tuple[BlockId, ...]
    num_stored: int = 0


class Writer(NamedTuple):
    """A stranger at work on source blocks."""

    block_ids: tuple[BlockId, ...]
    num_stored: int = 0


class World:
    """The state of everything. Moves work on a clone."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.source_pool = setting.pool_type(setting.source_blocks, 1)
        self.sink_pool = BlockPool(setting.sink_blocks, 1)
        self.source = setting.source_type(self.source_pool, SOURCE_INCARNATION, setting.timers, LAYOUT.component_mask)
        self.sink = setting.sink_type(self.sink_pool, SINK_INCARNATION, setting.timers, LAYOUT, setting.is_proven)
        self.source_bytes: list[tuple[str, str]] = [("-", "-")] * setting.source_blocks
        self.sink_bytes: list[tuple[str, str]] = [("-", "-")] * setting.sink_blocks
        self.net: set[Message] = set()
        self.flights: list[Flight] = []
        self.sequences: dict[int, Sequence] = {}
        self.step: Step | None = None
        self.writer: Writer | None = None
        self.foreign = 0
        self.destroys = 0
        self.is_destroying = False
        self.attempt = 0
        self.opened: set[int] = set()  # the router has heard SINK_READY of these attempts
        self.started: set[int] = set()  # the router has heard PROGRESS of these
        self.left: set[int] = set()  # the router goes on without these
        self.owed: set[tuple[int, str]] = set()  # CANCELs that are not answered yet
        self.ready: set[int] = set()
        self.finished: set[int] = set()
        self.num_computed_again = 0
        self.faulted = False
        self.next_attempt()

    # -- the router ----------------------------------------------------------------------------------------------------

    def transfer(self, attempt: int) -> TransferId:
        return TransferId(RequestId("r"), attempt, SOURCE_INCARNATION, SINK_INCARNATION)

    def next_attempt(self) -> None:
        if self.attempt:
            self.leave(self.attempt)
        self.attempt += 1
        self.faulted = False
        self.net.add(open_message(self.setting, self.transfer(self.attempt)))

    def leave(self, attempt: int) -> None:
        """The router goes on without this attempt: it owes both sides a CANCEL until they answer."""
        if attempt not in self.left:
            self.left.add(attempt)
            self.owed |= {(attempt, "source"), (attempt, "sink")}

    def router_hears(self, side: str, message: Any) -> None:
        attempt = message.transfer.attempt
        if isinstance(message, SinkReady) and attempt not in self.left:
            self.opened.add(attempt)
            self.net.add(start_message(self.setting, message.transfer, message.have_tokens))
        elif isinstance(message, Progress):
            self.started.add(attempt)
        elif isinstance(message, Gone) and message.about == "start":
            if attempt not in self.started:
                self.leave(attempt)
        elif isinstance(message, Closed | Gone):
            self.leave(attempt)
            self.owed.discard((attempt, side))
        elif isinstance(message, Failed):
            self.leave(attempt)

    # -- effects -------------------------------------------------------------------------------------------------------

    def do(self, side: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if effect.peer == ROUTER:
                    self.router_hears(side, effect.message)
                else:
                    self.send(effect.message)
            elif isinstance(effect, PostRead):
                generations = tuple(self.sink_pool.generation(block_id) for block_id in effect.local_ids)
                self.flights.append(Flight(effect.read_id, effect.local_ids, effect.remote_ids, generations))
            elif isinstance(effect, DestroyAgent):
                self.is_destroying = True
            elif isinstance(effect, Ready):
                self.ready.add(effect.transfer.attempt)
            elif isinstance(effect, Dropped) and side == "source":
                self.sequences.pop(effect.transfer.attempt, None)
            elif isinstance(effect, Dropped):
                self.ready.discard(effect.transfer.attempt)

    def send(self, message: Message) -> None:
        """Put a message on the network, without the words that nobody acts on. PROGRESS and KEEP are moves of their own."""
        if isinstance(message, Cancel):
            message = Cancel(message.transfer, "")
        elif isinstance(message, Gone) and message.about != "validate":
            message = Gone(message.transfer, "")
        if isinstance(message, Progress | Keep):
            return
        if not self.setting.is_lossy and isinstance(message, AT_ONCE):
            deliver(self, message)
            return
        if isinstance(message, Taken | Resend):  # it says all that still counts of an earlier one, which is lost
            self.net = {other for other in self.net if type(other) is not type(message) or other.transfer != message.transfer}
        self.net.add(message)

    # -- what is right -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """I2: what is committed or indexed is what was computed. I6: the pools add up."""
        self.source_pool.audit()
        self.sink_pool.audit()
        self.sink.audit()
        for pool, content, side in ((self.source_pool, self.source_bytes, "source"), (self.sink_pool, self.sink_bytes, "sink")):
            for key, block_id in pool._block_of.items():
                if content[block_id] != right(KEYS.index(key)):
                    raise Violation(f"I2: the {side}'s index finds {content[block_id]} where {right(KEYS.index(key))} should be")
        for handoff in self.sink._transfers.values():
            if handoff.state in (SinkState.FILLING, SinkState.READY, SinkState.RUNNING):
                for number in handoff.committed & set(handoff.chunks):
                    chunk = handoff.chunks[number]
                    if self.sink_bytes[chunk.local_ids[0]] != right(chunk.start):
                        raise Violation(f"I2: chunk {number} is committed with {self.sink_bytes[chunk.local_ids[0]]}")
                if handoff.state is not SinkState.FILLING:
                    for place in range(handoff.space.have_blocks):
                        if self.sink_bytes[handoff.space.table[place]] != right(place):
                            raise Violation(f"I9: the pinned block {place} holds {self.sink_bytes[handoff.space.table[place]]}")


KEYS = block_keys(pack_tokens(range(4)), b"", 1, False)


def right(chunk: int) -> tuple[str, str]:
    """What both components of this chunk's block hold when all is well."""
    return (f"c{chunk}", f"c{chunk}")


def open_message(setting: Setting, transfer: TransferId) -> OpenSink:
    address = WorkerAddress(WorkerId("p"), SOURCE_INCARNATION, "", 0)
    tokens = pack_tokens(range(setting.num_chunks))
    return OpenSink(transfer, tokens, setting.num_chunks, 0, b"", SamplingParameters(0, 1), 0, 1e9, address)


def start_message(setting: Setting, transfer: TransferId, need_from: int) -> StartSource:
    address = WorkerAddress(WorkerId("d"), SINK_INCARNATION, "", 0)
    tokens = pack_tokens(range(setting.num_chunks))
    return StartSource(transfer, tokens, setting.num_chunks, 0, need_from, b"", SamplingParameters(0, 1), 0, 1e9, address)


# -- moves -------------------------------------------------------------------------------------------------------------


def moves(w: World) -> Iterator[Move]:
    """Everything that may happen next."""
    yield from network_moves(w)
    yield from source_moves(w)
    yield from stranger_moves(w)
    yield from read_moves(w)
    yield from sink_moves(w)
    yield from router_moves(w)


def network_moves(w: World) -> Iterator[Move]:
    for message in tuple(w.net):
        name = f"{type(message).__name__}{getattr(message, 'read_number', '')}"
        if w.setting.is_lossy:
            yield Move(f"lose {name}", DAMAGE, lambda v, m=message: v.net.remove(m))  # type: ignore[misc]
        yield Move(name, NORMAL, lambda v, m=message: deliver(v, m))  # type: ignore[misc]


def deliver(w: World, message: Message) -> None:
    if not w.setting.is_lossy:
        w.net.discard(message)
    if isinstance(message, StartSource):
        is_new, effects = w.source.start(message, ROUTER, SINK, 0.0)
        if is_new:
            w.sequences[message.transfer.attempt] = Sequence()
        w.do("source", effects)
    elif isinstance(message, OpenSink):
        w.do("sink", w.sink.open(message, ROUTER, SOURCE, 0.0))
    elif isinstance(message, Resend) and message.transfer in w.source._lapsed and w.num_computed_again < w.setting.computes_again:
        compute_again(w, message.transfer)
    elif isinstance(message, Validate | Resend | Taken | Cancel):
        w.do("source", w.source.receive(SINK, message, 0.0))
    else:
        w.do("sink", w.sink.receive(SOURCE, message, 0.0))


def compute_again(w: World, transfer: TransferId) -> None:
    """PROTOCOL lets a source answer RESEND after its lease by computing the chunk again; ours does not, but a sink must bear it."""
    w.num_computed_again += 1
    del w.source._lapsed[transfer]
    start = start_message(w.setting, transfer, 0)
    w.source._live[transfer] = w.source.handoff_type(start, ROUTER, SINK, w.setting.timers, LAYOUT.component_mask, 0.0)
    w.sequences[transfer.attempt] = Sequence()


def source_moves(w: World) -> Iterator[Move]:
    for attempt, sequence in w.sequences.items():
        if w.step is None and sequence.num_sealed < w.setting.num_chunks and w.source_pool.num_available:
            yield Move(f"launch {attempt}", NORMAL, lambda v, a=attempt: launch(v, a))  # type: ignore[misc]
    if w.step is not None:
        yield Move("store" if w.step.num_stored < 2 else "step completes", NORMAL, store)
    for handoff in w.source._live.values():
        transfer = handoff.transfer
        if handoff.chunks:
            yield Move(f"lease of {transfer.attempt} ends", PATIENCE, lambda v, t=transfer: end_lease(v, t))  # type: ignore[misc]
        leg = w.sink._transfers.get(transfer)
        if (leg is not None and leg.is_filling) or w.sink._attempts.has_seen(transfer):
            yield Move(f"PROGRESS {transfer.attempt}", NORMAL, lambda v, t=transfer: tell_progress(v, t))  # type: ignore[misc]


def end_lease(w: World, transfer: TransferId) -> None:
    w.faulted = True
    handoff = w.source._live[transfer]
    w.do("source", w.source._settle(handoff, handoff.end_lease(w.source_pool)))


def tell_progress(w: World, transfer: TransferId) -> None:
    """PROGRESS arrives at once: one that is late says less than the next."""
    (to_sink, _) = w.source._live[transfer].say_progress(0.0)
    assert isinstance(to_sink, Send)
    w.do("sink", w.sink.receive(SOURCE, to_sink.message, 0.0))


def launch(w: World, attempt: int) -> None:
    """The scheduler admits the sequence if need be, takes a block and launches the step of the next chunk."""
    sequence = w.sequences[attempt]
    transfer = w.transfer(attempt)
    compute = Holder(HolderKind.COMPUTE, transfer)
    if not sequence.is_admitted:
        sequence.blocks = w.source_pool.pin(KEYS[: w.setting.num_chunks - 1], compute)
        sequence.is_admitted = True
        w.do("source", w.source.computing(transfer, 0.0))
    if not w.source_pool.num_available:
        return
    chunk = len(sequence.blocks)
    sequence.blocks += w.source_pool.allocate(1, compute)
    w.source_pool.hold(sequence.blocks, CHUNK_STEP)
    w.step = Step(attempt, chunk, tuple(sequence.blocks))
    while not w.setting.splits_steps and w.step is not None:
        store(w)


def store(w: World) -> None:
    """One component of the launched step, then its completion."""
    assert w.step is not None
    step = w.step
    *prefix, block_id = step.block_ids
    if step.num_stored == 2:
        complete(w, step)
        return
    if w.writer is not None and block_id in w.writer.block_ids:
        raise Violation("I1: a launched step stored into a source block that a stranger was handed")
    is_right = all(w.source_bytes[other] == right(index) for index, other in enumerate(prefix))
    w.source_bytes[block_id] = replaced(w.source_bytes[block_id], step.num_stored, f"c{step.chunk}" if is_right else "bad")
    w.step = step._replace(num_stored=step.num_stored + 1)


def complete(w: World, step: Step) -> None:
    """Publish, seal, and after the last chunk complete; unless the sequence was dropped meanwhile."""
    transfer = w.transfer(step.attempt)
    sequence = w.sequences.get(step.attempt)
    if sequence is not None and w.source.is_live(transfer):
        w.source_pool.publish(step.block_ids[-1], KEYS[step.chunk])
        start, sequence.num_sealed = sequence.num_sealed, step.chunk + 1
        w.do("source", w.source.seal(transfer, start, step.chunk + 1, step.block_ids[start:], 0.0))
        if step.chunk + 1 == w.setting.num_chunks:
            w.do("source", w.source.complete(transfer, HandoffRecord(RECORD_SCHEMA, 0, 42, None, 1, 0), 0.0))
    w.source_pool.release(step.block_ids, CHUNK_STEP)
    w.step = None


def replaced(content: tuple[str, str], component: int, value: str) -> tuple[str, str]:
    return (value, content[1]) if component == 0 else (content[0], value)


def stranger_moves(w: World) -> Iterator[Move]:
    if w.writer is not None:
        yield Move("X stores" if w.writer.num_stored < 2 else "X frees", NORMAL, stranger_stores)
    elif w.foreign < w.setting.foreign_uses and w.source_pool.num_available:
        yield Move("X is handed what the source has", NORMAL, stranger_takes)
    if w.sink_pool.held_by(STRANGER):
        yield Move("B frees", NORMAL, lambda v: v.sink_pool.release_all(STRANGER))
    elif w.setting.has_sink_stranger and w.sink_pool.num_available > w.sink.num_reserved_blocks:
        yield Move("B is handed a sink block", NORMAL, stranger_takes_at_sink)


def stranger_takes(w: World) -> None:
    """All that can be had: the worst that can happen to who wants to keep a block."""
    w.writer = Writer(tuple(w.source_pool.allocate(w.source_pool.num_available, STRANGER)))
    w.foreign += 1


def stranger_stores(w: World) -> None:
    assert w.writer is not None
    if w.writer.num_stored == 2:
        w.source_pool.release_all(STRANGER)
        w.writer = None
        return
    for block_id in w.writer.block_ids:
        w.source_bytes[block_id] = replaced(w.source_bytes[block_id], w.writer.num_stored, "X")
    w.writer = w.writer._replace(num_stored=w.writer.num_stored + 1)


def stranger_takes_at_sink(w: World) -> None:
    (block_id,) = w.sink_pool.allocate(1, STRANGER)
    w.sink_bytes[block_id] = ("B", "B")


def read_moves(w: World) -> Iterator[Move]:
    for index, flight in enumerate(w.flights):
        for place, component in flight.missing():
            yield Move(f"{('latent', 'index')[component]} lands", NORMAL, lambda v, f=index, p=place, c=component: land(v, f, p, c))  # type: ignore[misc]
        if flight.is_orphan:
            continue
        enough = not flight.missing() or (flight.landed and not w.setting.done_needs_all_components)
        if enough:
            yield Move("DONE", NORMAL, lambda v, f=index: done(v, f))  # type: ignore[misc]
        if w.destroys < w.setting.destroys and not w.is_destroying:
            yield Move("READ raises", DAMAGE, lambda v, f=index: raises(v, f))  # type: ignore[misc]
            yield Move("READ overdue", PATIENCE, lambda v: overdue(v))
    if w.is_destroying:
        yield Move("agent destroyed", NORMAL, destroyed)


def land(w: World, index: int, place: int, component: int) -> None:
    flight = w.flights[index]
    block_id = flight.local_ids[place]
    if not w.sink_pool.holders(block_id) or w.sink_pool.generation(block_id) != flight.generations[place]:
        raise Violation("I1: bytes of a READ landed in a sink block that was given back")
    w.sink_bytes[block_id] = replaced(w.sink_bytes[block_id], component, w.source_bytes[flight.remote_ids[place]][component])
    w.flights[index] = Flight(
        flight.read_id,
        flight.local_ids,
        flight.remote_ids,
        flight.generations,
        tuple(sorted((*flight.landed, (place, component)))),
        flight.is_orphan,
    )
    if flight.is_orphan and not w.flights[index].missing():
        del w.flights[index]


def done(w: World, index: int) -> None:
    flight = w.flights.pop(index)
    w.do("sink", w.sink.read_done(flight.read_id, 0.0))


def raises(w: World, index: int) -> None:
    w.faulted = True
    w.destroys += 1
    w.do("sink", w.sink.read_failed(w.flights[index].read_id, PeerLost("raised"), 0.0))


def overdue(w: World) -> None:
    w.faulted = True
    w.destroys += 1
    w.do("sink", w.sink._destroy(SOURCE))


def destroyed(w: World) -> None:
    """The thread has carried DestroyAgent out; where that is not proven the bytes move on."""
    w.is_destroying = False
    stops = w.setting.is_proven
    w.flights = (
        [] if stops else [Flight(f.read_id, f.local_ids, f.remote_ids, f.generations, f.landed, True) for f in w.flights if f.missing()]
    )
    w.do("sink", w.sink.agent_destroyed(SOURCE, 0.0))


def sink_moves(w: World) -> Iterator[Move]:
    for handoff in w.sink._transfers.values():
        transfer = handoff.transfer
        if handoff.state is SinkState.FILLING and w.setting.is_lossy:
            for number, chunk in handoff.chunks.items():
                if chunk.read_id is None and w.sink_pool.state(chunk.local_ids[0]) in (BlockState.LANDED, BlockState.DRAIN):
                    (asked,) = handoff.ask_again(w.sink_pool, number, 0.0)
                    assert isinstance(asked, Send)
                    if asked.message not in w.net:
                        yield Move("ask again", NORMAL, lambda v, t=transfer, n=number: ask_again(v, t, n))  # type: ignore[misc]
        if handoff.needs_source and handoff.is_heard and not w.source.is_live(transfer):
            yield Move("no progress", NORMAL, lambda v, t=transfer: miss_progress(v, t))  # type: ignore[misc]
        if w.setting.decodes and handoff.state is SinkState.READY:
            yield Move("run", NORMAL, lambda v, t=transfer: v.do("sink", v.sink.running(t, 0.0)))  # type: ignore[misc]
        if w.setting.decodes and handoff.state is SinkState.RUNNING:
            yield Move("finish", NORMAL, lambda v, t=transfer: finish(v, t))  # type: ignore[misc]
    if w.setting.is_lossy and w.sink.keep():
        yield Move("KEEP", NORMAL, keep)


def ask_again(w: World, transfer: TransferId, number: int) -> None:
    w.do("sink", w.sink._transfers[transfer].ask_again(w.sink_pool, number, 0.0))


def miss_progress(w: World, transfer: TransferId) -> None:
    handoff = w.sink._transfers[transfer]
    w.do("sink", w.sink._settle(handoff, handoff.miss_progress(w.sink_pool)))


def abort(w: World) -> None:
    w.faulted = True
    w.leave(w.attempt)


def finish(w: World, transfer: TransferId) -> None:
    w.finished.add(transfer.attempt)
    w.do("sink", w.sink.finished(transfer, 0.0))
    w.leave(transfer.attempt)


def keep(w: World) -> None:
    for effect in w.sink.keep():
        assert isinstance(effect, Send)
        w.do("source", w.source.receive(SINK, effect.message, 0.0))


def router_moves(w: World) -> Iterator[Move]:
    """The router repeats what was lost, leaves an attempt that cannot go on, and cancels until it is answered."""
    transfer = w.transfer(w.attempt)
    leg = w.sink._live(transfer)
    if w.attempt not in w.left:
        if w.setting.aborts:
            yield Move("abort", PATIENCE, abort)
        opened = open_message(w.setting, transfer)
        if w.attempt not in w.opened and opened not in w.net:
            yield Move("OPEN_SINK again", NORMAL, lambda v: v.net.add(opened))
        if w.attempt in w.opened and w.attempt not in w.started and leg is not None:
            started = start_message(w.setting, transfer, leg.have_tokens)
            if started not in w.net:
                yield Move("START_SOURCE again", NORMAL, lambda v: v.net.add(started))
        if w.attempt in w.started and not w.source.is_live(transfer) and leg is not None and leg.needs_source and not leg.is_heard:
            yield Move("the router misses PROGRESS", NORMAL, lambda v: v.leave(v.attempt))
    for attempt, side in sorted(w.owed):
        yield Move(f"CANCEL {attempt} at the {side}", NORMAL, lambda v, a=attempt, s=side: cancel(v, a, s))  # type: ignore[misc]
    if w.attempt < w.setting.attempts and not w.ready and not w.finished:
        yield Move("next attempt", NORMAL if w.attempt in w.left else PATIENCE, World.next_attempt)


def cancel(w: World, attempt: int, side: str) -> None:
    session = w.source if side == "source" else w.sink
    w.do(side, session.receive(ROUTER, Cancel(w.transfer(attempt), ""), 0.0))


# -- messages that no rule can use any more ----------------------------------------------------------------------------


NEVER_CHANGES = ("setting", "_timers", "_layout", "_keys", "_salt", "_sealed", "_compute", "_holder", "_request")
FOLLOWS_FROM_OTHERS = ("_free", "_held_by", "_block_of", "_quarantined")
MEANS_NOTHING_HERE = ("reason", "next_progress_s", "lease_until_s", "heard_s", "asked_s", "posted_s", "granted_blocks")
SHAPES: dict[type, dict[str, Shape]] = {
    World: {
        "source_pool": Shape.OBJECT,
        "sink_pool": Shape.OBJECT,
        "source": Shape.OBJECT,
        "sink": Shape.OBJECT,
        "source_bytes": Shape.FLAT,
        "sink_bytes": Shape.FLAT,
        "net": Shape.FLAT,
        "flights": Shape.LIST_OF_OBJECTS,
        "sequences": Shape.DICT_OF_OBJECTS,
        "opened": Shape.FLAT,
        "started": Shape.FLAT,
        "left": Shape.FLAT,
        "owed": Shape.FLAT,
        "ready": Shape.FLAT,
        "finished": Shape.FLAT,
    },
    Flight: {},
    Sequence: {"blocks": Shape.FLAT},
    BlockPool: {
        "_free": Shape.LISTS,
        "_generations": Shape.FLAT,
        "_states": Shape.FLAT,
        "_holders": Shape.SETS,
        "_held_by": Shape.DICT_OF_SETS,
        "_key_of": Shape.FLAT,
        "_block_of": Shape.FLAT,
        "_evictable": Shape.LISTS,
        "_quarantined": Shape.FLAT,
        "_promised": Shape.FLAT,
    },
    AttemptMemory: {"_largest": Shape.FLAT},
    SourceSession: {"_pool": Shape.OBJECT, "_live": Shape.DICT_OF_OBJECTS, "_lapsed": Shape.FLAT, "_attempts": Shape.OBJECT},
    SourceHandoff: {"chunks": Shape.FLAT, "taken": Shape.FLAT},
    SinkSession: {
        "_pool": Shape.OBJECT,
        "_transfers": Shape.DICT_OF_OBJECTS,
        "_reads": Shape.FLAT,
        "_destroying": Shape.FLAT,
        "_attempts": Shape.OBJECT,
    },
    SinkHandoff: {"space": Shape.OBJECT, "chunks": Shape.DICT_OF_OBJECTS, "committed": Shape.FLAT, "_keys": Shape.FLAT},
    SinkChunk: {},
    SinkSpace: {"_blocks": Shape.FLAT},
}
NEVER_CHANGES = ("setting", "_timers", "_layout", "_keys", "_salt", "_sealed", "_compute", "_holder")
FOLLOWS_FROM_OTHERS = ("_free", "_held_by", "_block_of", "_quarantined")
MEANS_NOTHING_HERE = ("reason", "next_progress_s", "lease_until_s", "heard_s", "asked_s", "posted_s", "granted_blocks")
CODEC = Codec(SHAPES, (*NEVER_CHANGES, *FOLLOWS_FROM_OTHERS, *MEANS_NOTHING_HERE))


def tidy(w: World) -> None:
    """Drop dead messages. It only merges states that behave alike, so it is not for a kind whose rule is off."""
    w.net = {message for message in w.net if type(message) in w.setting.never_dead or not is_dead(w, message)}


def is_dead(w: World, message: Any) -> bool:
    transfer = message.transfer
    leg = w.sink._live(transfer)
    source_live = w.source.is_live(transfer)
    source_over = not source_live and w.source._attempts.has_seen(transfer)
    if isinstance(message, Validate | Valid | Stale) or (isinstance(message, Gone) and message.about == "validate"):
        chunk = leg.chunks.get(message.chunk) if leg is not None else None
        waits = chunk is not None and message.chunk not in leg.committed and chunk.read_number == message.read_number  # type: ignore[union-attr]
        return not waits or w.sink_pool.state(chunk.local_ids[0]) is BlockState.DRAIN  # type: ignore[union-attr]
    if isinstance(message, Gone):
        return (leg is None and w.sink._attempts.has_seen(transfer)) or (leg is not None and leg.has_everything)
    if isinstance(message, Complete):
        return (leg is None and not source_live) or (leg is not None and leg.has_record_answer)
    if isinstance(message, Seal):
        return (leg is None and not source_live) or (leg is not None and message.chunk in leg.committed)
    if isinstance(message, StartSource):
        return w.source._attempts.has_seen(transfer)
    if isinstance(message, OpenSink):
        return w.sink._attempts.has_seen(transfer)
    if isinstance(message, Cancel | Taken):
        return source_over
    return source_over and (leg is None or not leg.needs_source)  # RESEND
