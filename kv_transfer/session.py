"""All transfers of one worker, as a source or as a sink: finds the transfer of a message, remembers closed ones, asks the clock nothing.

Every method takes `now_s` (any monotonic clock of the worker) and returns the effects that the worker must carry out, in order.
A method that names a transfer which has ended meanwhile does nothing: the engine may be one step behind the network.
"""

from kv_transfer.block_pool import BlockPool
from kv_transfer.config import ProtocolTimers
from kv_transfer.errors import TransferError
from kv_transfer.handoff import Effect
from kv_transfer.identity import BlockId, Incarnation, PackedTokens, PeerId, TransferId
from kv_transfer.layout import CacheLayout
from kv_transfer.messages import FailureKind, HandoffRecord, Message, OpenSink, StartSource


class SourceSession:
    """The transfers that this worker computes and sends."""

    def __init__(self, pool: BlockPool, incarnation: Incarnation, timers: ProtocolTimers, component_mask: int) -> None:
        raise NotImplementedError

    def start(self, message: StartSource, router: PeerId, sink: PeerId, now_s: float) -> tuple[bool, list[Effect]]:
        """Take START_SOURCE. Returns (whether the worker must queue a new sequence, effects).

        A duplicate returns False and says PROGRESS again; after any release, or for another incarnation, it is answered GONE.
        A larger attempt of the same request first holds what the smaller one has sealed, then the smaller one is Dropped.
        """
        raise NotImplementedError

    def computing(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The scheduler has taken the sequence out of its queue. The worker holds the blocks under Holder(COMPUTE, transfer)."""
        raise NotImplementedError

    def progress(self, transfer: TransferId, num_computed_tokens: int, queue_position: int) -> None:
        """What the next PROGRESS says."""
        raise NotImplementedError

    def seal(self, transfer: TransferId, start: int, end: int, block_ids: tuple[BlockId, ...], now_s: float) -> list[Effect]:
        """The cache of tokens [start, end) is stored in `block_ids` and is final. Call after the chunk's last store.

        `start` is a multiple of the block size; `end` too, except for the prompt's last chunk. Tokens before `need_from` are not
        announced, so cached blocks may be sealed together with the first computed chunk.
        """
        raise NotImplementedError

    def complete(self, transfer: TransferId, record: HandoffRecord, now_s: float) -> list[Effect]:
        """The last chunk is sealed and token `first_index` drawn. Releases COMPUTE on every block; the digest is filled in here."""
        raise NotImplementedError

    def fail(self, transfer: TransferId, kind: FailureKind, code: str, message: str, now_s: float) -> list[Effect]:
        """The worker cannot go on: FAILED to router and sink, everything released."""
        raise NotImplementedError

    def receive(self, peer: PeerId, message: Message, now_s: float) -> list[Effect]:
        """Any message of a hand-off but START_SOURCE; one that is not for a source is ignored."""
        raise NotImplementedError

    def peer_lost(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The peer's process or connection is gone: whatever it opened here, or was sent to it, ends."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Effect]:
        """Look at the timers; call about every 100 ms."""
        raise NotImplementedError

    def is_live(self, transfer: TransferId) -> bool:
        """Whether the transfer is known and not released."""
        raise NotImplementedError

    @property
    def num_live(self) -> int:
        """Transfers that are not released."""
        raise NotImplementedError


class SinkSession:
    """The transfers that this worker receives and decodes, including those that it fills itself."""

    def __init__(
        self, pool: BlockPool, incarnation: Incarnation, timers: ProtocolTimers, layout: CacheLayout, destroying_proven: bool
    ) -> None:
        raise NotImplementedError

    def open(self, message: OpenSink, router: PeerId, source: PeerId | None, now_s: float, busy_s: float | None = None) -> list[Effect]:
        """Take OPEN_SINK: pin the prefix that is here, reserve the credit, answer SINK_READY; or SINK_BUSY.

        busy_s: refuse with this retry-after. A duplicate gets the same answer; after CANCEL it is GONE; a larger attempt drains
        the smaller one. Without a source the blocks are allocated at once and FillLocally says where to begin.
        """
        raise NotImplementedError

    def block_table(self, transfer: TransferId) -> tuple[BlockId, ...]:
        """Blocks of the sequence in order, pinned prefix first; as many as are allocated so far. Empty when the transfer has ended."""
        raise NotImplementedError

    def have_tokens(self, transfer: TransferId) -> int:
        """Tokens at the start of the sequence that need not be sent or computed. Raises KeyError for an unknown transfer."""
        raise NotImplementedError

    def record(self, transfer: TransferId) -> HandoffRecord | None:
        """The usable hand-off record, if there is one. Raises KeyError for an unknown transfer."""
        raise NotImplementedError

    def grow(self, transfer: TransferId, num_blocks: int) -> None:
        """Append blocks for output tokens, from the credit first. Raises PoolExhausted: preempt the youngest request."""
        raise NotImplementedError

    def filled_locally(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """What FillLocally asked for is computed: the transfer is READY (no Ready effect)."""
        raise NotImplementedError

    def running(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The scheduler has put the sequence into its running batch."""
        raise NotImplementedError

    def finished(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The last token is sampled. The blocks go back (those published stay cached); the worker keeps the tokens until Dropped."""
        raise NotImplementedError

    def preempted(self, transfer: TransferId, now_s: float) -> list[Effect]:
        """The sequence gives its blocks up; steps in flight keep their own holders."""
        raise NotImplementedError

    def resume(self, transfer: TransferId, tokens: PackedTokens, now_s: float) -> list[Effect]:
        """Fill a preempted sequence again with `tokens` (prompt and output so far): FillLocally. Raises PoolExhausted."""
        raise NotImplementedError

    def receive(self, peer: PeerId, message: Message, now_s: float) -> list[Effect]:
        """Any message of a hand-off but OPEN_SINK; one that is not for a sink is ignored. ASK is only answered when GONE."""
        raise NotImplementedError

    def peer_lost(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The peer's process or connection is gone. A router's death cancels what it opened; a source's fails what needs it."""
        raise NotImplementedError

    def read_done(self, read_id: int, now_s: float) -> list[Effect]:
        """Every byte of the READ has landed."""
        raise NotImplementedError

    def read_failed(self, read_id: int, error: TransferError, now_s: float) -> list[Effect]:
        """The READ raised, which is not DONE: the peer's agent must be destroyed before the blocks can go back."""
        raise NotImplementedError

    def agent_destroyed(self, peer: PeerId, now_s: float) -> list[Effect]:
        """The agent that served `peer` is gone, and with it every READ from that peer that had not ended."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Effect]:
        """Look at the timers; call about every 100 ms."""
        raise NotImplementedError

    def is_live(self, transfer: TransferId) -> bool:
        """Whether the transfer is known and neither draining nor closed."""
        raise NotImplementedError

    @property
    def num_live(self) -> int:
        """Transfers that are neither draining nor closed."""
        raise NotImplementedError

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are promised as credit and not allocated yet."""
        raise NotImplementedError
