"""Keeps the blocks of launched steps from being handed out, whatever happens to their sequences meanwhile.

Knows: which sequences the step in flight reads and stores, and their STEP holders. Does not know what a step computes.
A holder is taken when a sequence first joins a step and given back when it has left and its last step has returned, so a
sequence that decodes a thousand steps costs its blocks one holder each, not a thousand.
"""

from collections.abc import Collection, Iterable

from kv_transfer.block_pool import EXCHANGE, BlockPool, Holder, HolderKind
from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, SequenceId


class StepHolders:
    """STEP holders of one worker, owned by sequence. Each method may be called again without harm."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._in_flight: Collection[SequenceId] = ()
        self._left: set[SequenceId] = set()
        self._to_copy: list[BlockCopy] = []
        self._copying: tuple[BlockCopy, ...] = ()

    def cover(self, sequence_id: SequenceId, block_ids: Iterable[BlockId]) -> None:
        """The sequence's steps may read or store these blocks from now on; the caller holds them already."""
        self._pool.hold(block_ids, _holder_of(sequence_id))

    def uncover(self, sequence_id: SequenceId) -> None:
        """The sequence joins no further step: give its blocks back, at once or when the step in flight has returned."""
        if self._in_flight and not isinstance(self._in_flight, frozenset):
            self._in_flight = frozenset(self._in_flight)  # asked of few steps: most of them lose nobody
        if sequence_id in self._in_flight:
            self._left.add(sequence_id)
        else:
            self._pool.release_all(_holder_of(sequence_id))

    def launch(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A step with these sequences begins; at most one is in flight."""
        assert not self._in_flight, "a step is launched while another is in flight"
        self._in_flight = tuple(sequence_ids)

    def copy_later(self, copies: Iterable[BlockCopy]) -> None:
        """The ranks must copy these blocks among themselves; they have an EXCHANGE holder until a step has."""
        self._to_copy += copies

    def launch_copies(self) -> tuple[BlockCopy, ...]:
        """What the step that begins now copies first: everything since the last."""
        assert not self._copying, "copies are launched while others are in flight"
        self._copying, self._to_copy = tuple(self._to_copy), []
        return self._copying

    def land(self) -> None:
        """The step in flight has returned: no byte of it is stored any more."""
        self._in_flight = ()
        if self._copying:
            self._pool.release([copy.block_id for copy in self._copying], EXCHANGE)
            self._copying = ()
        for sequence_id in self._left:
            self._pool.release_all(_holder_of(sequence_id))
        self._left.clear()


def _holder_of(sequence_id: SequenceId) -> Holder:
    return Holder(HolderKind.STEP, sequence_id)
