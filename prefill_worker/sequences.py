"""The requests of a prefill worker: who waits, who computes, and which blocks each has.

Knows: order, blocks and how far each has come. Does not know messages (`sender.py`) or what a step computes (`engine.py`).
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from glm_runtime.engine.chunk_plan import PrefillDemand
from glm_runtime.engine.prompt_scores import PromptScores
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.sampling.grammar import GrammarState
from kv_transfer.block_keys import extend_block_keys
from kv_transfer.block_pool import BlockPool, Holder, HolderKind
from kv_transfer.identity import TOKEN_BYTES, BlockId, PackedTokens, SequenceId, TransferId, count_tokens, pack_tokens, unpack_tokens
from kv_transfer.messages import SamplingParameters
from prefill_worker.scheduler import WaitingPrefill


@dataclass(kw_only=True, slots=True, eq=False)
class PrefillSequence:
    """One prompt. `keys` are those of its full blocks, as far as they are known; the block table covers all of it from admission on.

    scores: the prompt's log-probabilities, where they are asked for.
    grammar: where its output is in its grammar. awaits_grammar: it is not compiled yet, and the sequence does not queue.
    """

    sequence_id: SequenceId
    transfer: TransferId
    tokens: PackedTokens
    salt: bytes
    keys: list[bytes]
    sampling: SamplingParameters
    num_prompt_tokens: int
    first_index: int
    need_from: int
    urgency_s: float
    block_table: list[BlockId] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    grammar: GrammarState | None = None
    awaits_grammar: bool = False
    scores: PromptScores | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute: the prompt and what earlier attempts have emitted."""
        return count_tokens(self.tokens)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end), new list."""
        return unpack_tokens(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def publish_computed(self, pool: BlockPool) -> None:
        """Enter the full blocks that are computed and have their keys into the prefix index."""
        num_full = min(self.num_computed_tokens // pool.block_size_tokens, len(self.keys))
        for index in range(self.num_published_blocks, num_full):
            pool.publish(self.block_table[index], self.keys[index])
        self.num_published_blocks = max(self.num_published_blocks, num_full)

    def publish_last(self, pool: BlockPool, token: int) -> None:
        """The same once everything is computed and `token` is drawn: a full last block whose key needs the token after it has one now."""
        size = pool.block_size_tokens
        if self.num_tokens == (len(self.keys) + 1) * size:
            known = PackedTokens(self.tokens + pack_tokens((token,)))
            self.keys = extend_block_keys(self.keys, known, self.salt, size, looks_one_token_ahead=True)
        self.publish_computed(pool)


class PrefillSequences:
    """Waiting and computing sequences of one worker and their blocks. One loop owns it."""

    def __init__(self, pool: BlockPool, holders: StepHolders) -> None:
        self._pool = pool
        self._holders = holders
        self._numbers = itertools.count()
        self._arrived: list[PrefillSequence] = []
        self._waiting: list[PrefillSequence] = []
        self._computing: dict[SequenceId, PrefillSequence] = {}
        self._of_transfer: dict[TransferId, PrefillSequence] = {}

    # -- coming and going ----------------------------------------------------------------------------------------------

    def new_id(self, transfer: TransferId) -> SequenceId:
        """A name that no other sequence of this worker has had."""
        return SequenceId(f"{transfer.request_id}.{transfer.attempt}#{next(self._numbers)}")

    def add(self, sequence: PrefillSequence) -> None:
        """Take a new sequence; it waits once the engine has taken its commands."""
        self._of_transfer[sequence.transfer] = sequence
        self._arrived.append(sequence)

    def queue_arrived(self) -> None:
        """Sort what has arrived into the queue; equal urgency keeps the order of arrival."""
        for sequence in self._arrived:
            if not sequence.awaits_grammar:
                bisect.insort_right(self._waiting, sequence, key=_urgency_of)
        self._arrived = [sequence for sequence in self._arrived if sequence.awaits_grammar]

    def admit(self, sequence_ids: tuple[SequenceId, ...]) -> list[PrefillSequence]:
        """Give these waiting sequences all their blocks: first every cached prefix is pinned, so that no allocation evicts it."""
        wanted = set(sequence_ids)
        admitted = [sequence for sequence in self._waiting if sequence.sequence_id in wanted]
        self._waiting = [sequence for sequence in self._waiting if sequence.sequence_id not in wanted]
        for sequence in admitted:
            sequence.block_table = self._pool.pin(self._usable_keys(sequence), _holder_of(sequence))
            sequence.num_published_blocks = len(sequence.block_table)
            sequence.num_cached_tokens = sequence.num_computed_tokens = len(sequence.block_table) * self._pool.block_size_tokens
        for sequence in admitted:
            num_pinned = len(sequence.block_table)
            sequence.block_table += self._pool.allocate(self._num_blocks(sequence) - num_pinned, _holder_of(sequence), num_pinned)
            self._computing[sequence.sequence_id] = sequence
        return admitted

    def complete(self, sequence: PrefillSequence) -> None:
        """The last chunk is computed: from here on its blocks are held by what is sealed and by the cache."""
        self.drop(sequence.transfer)

    def drop(self, transfer: TransferId) -> None:
        """Forget a sequence and let its blocks go; those of a step in flight stay held until it has returned. Idempotent."""
        sequence = self._of_transfer.pop(transfer, None)
        if sequence is None:
            return
        if self._computing.pop(sequence.sequence_id, None) is None:
            self._waiting = [other for other in self._waiting if other is not sequence]
            self._arrived = [other for other in self._arrived if other is not sequence]
        self._pool.release_all(_holder_of(sequence))
        self._holders.uncover(sequence.sequence_id)

    def unpin_waiting(self) -> bool:
        """Let go what waiting sequences hold, the blocks of their superseded attempts: the next in line may need them to begin.

        They stay cached for as long as nobody does. Returns whether there were any.
        """
        holders = [holder for sequence in self._waiting if self._pool.held_by(holder := _holder_of(sequence))]
        for holder in holders:
            self._pool.release_all(holder)
        return bool(holders)

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[PrefillSequence]:
        """Who waits, most urgent first. Not to be changed."""
        return self._waiting

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, those just arrived included."""
        return len(self._waiting) + len(self._arrived)

    @property
    def num_computing(self) -> int:
        """Sequences with blocks whose last chunk is not computed."""
        return len(self._computing)

    def is_known(self, sequence: PrefillSequence) -> bool:
        """Whether the sequence has neither ended nor been dropped."""
        return self._of_transfer.get(sequence.transfer) is sequence

    def computing(self, sequence_id: SequenceId) -> PrefillSequence | None:
        """The computing sequence of this id; None when it has ended meanwhile."""
        return self._computing.get(sequence_id)

    def live(self) -> Iterator[tuple[PrefillSequence, int]]:
        """Every sequence with its place in the queue; 0 for those that compute."""
        for sequence in self._computing.values():
            yield sequence, 0
        yield from zip((*self._waiting, *self._arrived), itertools.count(1), strict=False)

    def demands(self) -> tuple[PrefillDemand, ...]:
        """What the computing sequences have left to do, most urgent first."""
        return tuple(
            PrefillDemand(
                sequence_id=sequence.sequence_id, num_computed_tokens=sequence.num_computed_tokens, num_tokens=sequence.num_tokens
            )
            for sequence in sorted(self._computing.values(), key=_urgency_of)
        )

    def candidates(self, max_candidates: int) -> tuple[WaitingPrefill, ...]:
        """The most urgent waiting sequences, with the blocks that admitting them would take."""
        return tuple(self._candidate(sequence) for sequence in self._waiting[: max(max_candidates, 0)])

    def num_queued_tokens(self) -> int:
        """Tokens that are not computed yet."""
        return sum(sequence.num_tokens - sequence.num_computed_tokens for sequence, _ in self.live())

    def _candidate(self, sequence: PrefillSequence) -> WaitingPrefill:
        pool = self._pool
        found = pool.lookup(self._usable_keys(sequence))
        num_new = list(pool.by_home(self._num_blocks(sequence)))
        for block_id in found:
            # A cached block that somebody holds already costs nothing; one that only the cache holds leaves the available ones.
            num_new[block_id % pool.num_homes] -= not pool.is_evictable(block_id)
        return WaitingPrefill(
            sequence_id=sequence.sequence_id,
            num_cached_tokens=len(found) * pool.block_size_tokens,
            num_tokens=sequence.num_tokens,
            num_new_blocks=tuple(num_new),
        )

    def _usable_keys(self, sequence: PrefillSequence) -> list[bytes]:
        """Keys that a prefix hit may use: at least the last token is computed, since the next one is drawn from it, and every token of
        a prompt that is scored."""
        if sequence.scores is not None:
            return []
        return sequence.keys[: (sequence.num_tokens - 1) // self._pool.block_size_tokens]

    def _num_blocks(self, sequence: PrefillSequence) -> int:
        return -(-sequence.num_tokens // self._pool.block_size_tokens)


def _urgency_of(sequence: PrefillSequence) -> float:
    return sequence.urgency_s


def _holder_of(sequence: PrefillSequence) -> Holder:
    return Holder(HolderKind.COMPUTE, sequence.transfer)
