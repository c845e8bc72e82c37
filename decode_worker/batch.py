"""The sequences that decode, as columns, kept from step to step.

Knows: until when the columns hold, and for how many steps nobody can run out of slots. Does not know what a step does with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.sequences import DecodeSequence, DecodeSequences, Phase
from kv_transfer.identity import SequenceId

NO_END_OF_SLOTS = 1 << 30
"""More than anybody asks for: who ends in the blocks it has takes none ahead of others."""


@dataclass(kw_only=True, slots=True)
class DecodeBatch:
    """Running sequences that steps may draw for, oldest first. num_roomy_steps: as many next steps find room for all their rows."""

    sequences: Sequence[DecodeSequence] = ()
    ids: tuple[SequenceId, ...] = ()
    num_roomy_steps: int = 0
    made_of: int = -1

    def refresh(self, known: DecodeSequences) -> None:
        """Make the columns again if somebody has come or gone since."""
        if self.made_of != known.num_running_changes:
            self.made_of = known.num_running_changes
            self.sequences = known.drawable(Phase.RUNNING)
            self.ids = tuple([sequence.sequence_id for sequence in self.sequences])
            self.num_roomy_steps = 0

    def free_slots(self, block_size_tokens: int) -> tuple[int, ...]:
        """Tokens that each can still store in the blocks it has; NO_END_OF_SLOTS where it can store all that it may still have."""
        slots = []
        for sequence in self.sequences:
            capacity = len(sequence.block_table) * block_size_tokens
            slots.append(NO_END_OF_SLOTS if capacity >= sequence.end_tokens else capacity - sequence.num_stored_tokens)
        return tuple(slots)

    def look_ahead(self, block_size_tokens: int, max_rows: int) -> None:
        """Count the steps of at most `max_rows` rows for each that have room after the one that is planned now."""
        self.num_roomy_steps = max(min(self.free_slots(block_size_tokens), default=0) // max_rows - 1, 0)


@dataclass(kw_only=True, slots=True)
class StepBatch:
    """Whom the step in flight computes: its rows, then its chunks, as the plan's slices have them. row_drafts: of each row."""

    rows: Sequence[DecodeSequence] = ()
    row_ids: Sequence[SequenceId] = ()
    row_drafts: Sequence[int] = ()
    chunks: Sequence[DecodeSequence] = ()
