"""The requests of a decode worker: their tokens, their blocks, and whether they are filled, run, wait or are done.

Knows: order by age and how far each sequence has come. Does not know messages (`receiver.py`) or steps (`engine.py`).
"""

import bisect
import itertools
from dataclasses import dataclass, field
from enum import Enum, unique

from glm_runtime.engine.prompt_scores import PromptScores
from glm_runtime.runtime_config import MOST_DRAFTS
from glm_runtime.sampling.grammar import GrammarState
from glm_runtime.sampling.history import TokenHistory
from kv_transfer.block_keys import append_block_keys
from kv_transfer.block_pool import BlockPool
from kv_transfer.identity import TOKEN_BYTES, BlockId, PeerId, SequenceId, TransferId, pack_tokens, unpack_tokens
from kv_transfer.messages import FinishReason, SamplingParameters, TokenLogprobs


@unique
class Phase(Enum):
    """What the engine does with a sequence; the transfer's own state is the session's."""

    PULLED = "pulled"
    FILLING = "filling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PULLED: frozenset({Phase.FILLING, Phase.RUNNING, Phase.FINISHED}),
    Phase.FILLING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.PREEMPTED, Phase.FINISHED}),
    Phase.PREEMPTED: frozenset({Phase.FILLING}),
    Phase.FINISHED: frozenset(),
}
"""Any phase may also end by being dropped, which is not a phase: the sequence is forgotten."""


@dataclass(kw_only=True, slots=True, eq=False)
class DecodeSequence:
    """One request. Its tokens: the prompt, what earlier attempts have emitted, then what this one does.

    packed: the tokens but the newest, which are packed when somebody wants them (`tokens`) and lie in `unpacked` until then.
    num_tokens: how many are known; counted, since steps ask all the time. num_given_tokens: how many came with OPEN_SINK.
    num_stored_tokens: how many are in the cache; the next row starts there. While running it is all but the newest token.
    num_published_blocks: how many are in the prefix index. num_covered_blocks: how many have a STEP holder.
    is_ready: the session takes the transfer for filled.
    index_of_first: output index that the sequence's first token would have, so that of its token n it is n more. end_tokens: how many
    tokens it has when its output is as long as it may be. stop_ids: tokens that end it before.
    is_plain: of each step it wants the tokens and nothing more.
    last_token: the newest token that this attempt has emitted.
    drafts: guesses at what follows it. seed_hidden: the hidden state of the last stored token, from another worker: drafts can be made
    of it in the next step.
    history: what penalties and bad words see, where the request has any. logprobs: of each token that this attempt has emitted, where
    they are asked for. prompt_logprobs: where they are asked for and known; scores: on their way, while they are computed here.
    grammar: where the output is in its grammar. awaits_grammar: it is not compiled yet, and no step draws for the sequence.
    record_grammar_digest: what prefill says of that state after the record's token.
    is_dropped: it is forgotten, and what a step in flight draws for it is thrown away.
    """

    sequence_id: SequenceId
    age: int
    transfer: TransferId
    router: PeerId
    packed: bytearray
    num_tokens: int
    num_given_tokens: int
    num_prompt_tokens: int
    first_index: int
    salt: bytes
    sampling: SamplingParameters
    phase: Phase = Phase.PULLED
    block_table: list[BlockId] = field(default_factory=list)
    num_stored_tokens: int = 0
    num_cached_tokens: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_covered_blocks: int = 0
    is_ready: bool = False
    unpacked: list[int] = field(default_factory=list)
    index_of_first: int = field(init=False)
    end_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    is_plain: bool = field(init=False)
    last_token: int = -1
    drafts: tuple[int, ...] = ()
    seed_hidden: bytes | None = None
    finish: FinishReason | None = None
    history: TokenHistory | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    scores: PromptScores | None = None
    grammar: GrammarState | None = None
    awaits_grammar: bool = False
    record_grammar_digest: bytes | None = None
    is_dropped: bool = False

    def __post_init__(self) -> None:
        self.index_of_first = self.first_index - self.num_given_tokens
        self.end_tokens = self.sampling.max_tokens - self.index_of_first
        self.stop_ids = frozenset(self.sampling.stop_token_ids)
        self.is_plain = self.history is None and self.sampling.grammar is None and self.sampling.logprobs < 0

    @property
    def next_index(self) -> int:
        """Index of the next output token of the request, over all attempts."""
        return self.num_tokens + self.index_of_first

    @property
    def num_left_tokens(self) -> int:
        """Output tokens that it may still have."""
        return self.end_tokens - self.num_tokens

    @property
    def tokens(self) -> bytearray:
        """All tokens, packed. Not to be changed, and out of date once there are more."""
        if self.unpacked:
            self.packed += pack_tokens(self.unpacked)
            self.unpacked.clear()
        return self.packed

    def token_ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end), new list."""
        return unpack_tokens(bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))

    def emitted_from(self, index: int) -> list[int]:
        """Tokens that this attempt has emitted, from output index `index` on."""
        skipped = max(index - self.first_index, 0)
        return self.token_ids(self.num_given_tokens + skipped, self.num_tokens)

    def logprobs_from(self, index: int) -> tuple[TokenLogprobs, ...]:
        """Of `emitted_from`, where they are asked for."""
        return tuple(self.logprobs[max(index - self.first_index, 0) :])

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next output token, and note whether it is the last."""
        assert self.finish is None, f"{self.sequence_id} has ended and gets another token"
        self.unpacked.append(token)
        self.num_tokens += 1
        self.last_token = token
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.history is not None:
            self.history.extend((token,))
        if token in self.stop_ids:
            self.finish = FinishReason.STOP
        elif self.num_left_tokens <= 0:
            self.finish = FinishReason.LENGTH

    def append_run(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> tuple[int, ...]:
        """Take the next output tokens up to the one that ends the output. Returns those taken; what stood after it was never asked for.

        logprobs: one for each of `tokens`, or none at all.
        """
        for number, (token, told) in enumerate(itertools.zip_longest(tokens, logprobs), start=1):
            self.append(token, told)
            if self.finish is not None:
                return tokens[:number]
        return tokens

    def follow_grammar(self, tokens: tuple[int, ...]) -> bool:
        """Whether tokens that were just appended are of the sequence's grammar; without one, and before it has come, they are."""
        return self.grammar is None or self.grammar.accept(tokens)

    def has_grammar_of_record(self) -> bool:
        """Whether the grammar's state after the record's token is the one that prefill has, where both are known."""
        return self.grammar is None or self.record_grammar_digest in (None, self.grammar.digest())

    @property
    def num_available_drafts(self) -> int:
        """Drafts that the next step can verify; as many as it likes where it makes them itself."""
        return len(self.drafts) if self.seed_hidden is None else MOST_DRAFTS

    def lose_blocks(self) -> None:
        """Nothing of the sequence is in its own blocks any more."""
        self.block_table = []
        self.drafts = ()
        self.seed_hidden = None
        self.num_stored_tokens = self.num_published_blocks = self.num_covered_blocks = 0
        self.is_ready = False

    def uncovered_blocks(self) -> list[BlockId]:
        """Blocks that no step has read or stored yet; the caller covers them."""
        blocks = self.block_table[self.num_covered_blocks :]
        self.num_covered_blocks = len(self.block_table)
        return blocks

    def unpublished_keys(self, block_size_tokens: int, looks_one_token_ahead: bool) -> list[bytes]:
        """Keys of the full blocks in the cache that are not in the prefix index yet, as far as they are known by now."""
        num_full = self.num_stored_tokens // block_size_tokens
        if num_full > len(self.keys):
            append_block_keys(self.keys, self.tokens, self.salt, block_size_tokens, looks_one_token_ahead)
        return self.keys[self.num_published_blocks : num_full]

    def publish_stored(self, pool: BlockPool, looks_one_token_ahead: bool) -> None:
        """Enter the full blocks in the cache into the prefix index, as far as their keys are known by now."""
        index = self.num_published_blocks
        for key in self.unpublished_keys(pool.block_size_tokens, looks_one_token_ahead):
            pool.publish(self.block_table[index], key)
            index += 1
        self.num_published_blocks = index


class DecodeSequences:
    """All sequences of one worker, by transfer and by phase, oldest first. One loop owns it.

    num_running_changes: grows whenever `running` would be another list, so that what was made of it can be kept until then.
    """

    def __init__(self) -> None:
        self.num_running_changes = 0
        self._ages = itertools.count()
        self._of_transfer: dict[TransferId, DecodeSequence] = {}
        self._of_id: dict[SequenceId, DecodeSequence] = {}
        self._in_phase: dict[Phase, list[DecodeSequence]] = {phase: [] for phase in Phase}

    def new_age(self) -> int:
        """The age of the next sequence: larger is younger."""
        return next(self._ages)

    def add(self, sequence: DecodeSequence) -> None:
        """Take a new sequence."""
        self._of_transfer[sequence.transfer] = sequence
        self._of_id[sequence.sequence_id] = sequence
        self._insert(sequence)

    def move(self, sequence: DecodeSequence, phase: Phase) -> None:
        """Move a sequence on. Raises AssertionError for a move that PHASE_TRANSITIONS does not have."""
        assert phase in PHASE_TRANSITIONS[sequence.phase], f"{sequence.sequence_id} is {sequence.phase.value}, not {phase.value} next"
        self._leave_phase(sequence)
        sequence.phase = phase
        self._insert(sequence)

    def drop(self, transfer: TransferId) -> DecodeSequence | None:
        """Forget a sequence; the one forgotten, if it was known."""
        sequence = self._of_transfer.pop(transfer, None)
        if sequence is not None:
            sequence.is_dropped = True
            del self._of_id[sequence.sequence_id]
            self._leave_phase(sequence)
        return sequence

    def of_transfer(self, transfer: TransferId) -> DecodeSequence | None:
        """The sequence of this transfer; None when it has been dropped."""
        return self._of_transfer.get(transfer)

    def of_id(self, sequence_id: SequenceId) -> DecodeSequence | None:
        """The sequence of this id; None when it has been dropped."""
        return self._of_id.get(sequence_id)

    def in_phase(self, phase: Phase) -> list[DecodeSequence]:
        """The sequences in this phase, oldest first. Not to be changed."""
        return self._in_phase[phase]

    def await_grammar(self, sequence: DecodeSequence) -> None:
        """No step draws for the sequence until `take_grammar`."""
        sequence.awaits_grammar = True
        self.num_running_changes += 1

    def take_grammar(self, sequence: DecodeSequence, state: GrammarState | None) -> None:
        """The grammar that was awaited has come, or is not wanted any more."""
        sequence.grammar, sequence.awaits_grammar = state, False
        self.num_running_changes += 1

    def drawable(self, phase: Phase) -> list[DecodeSequence]:
        """Those of a phase whose grammar is not awaited, oldest first, new list."""
        return [sequence for sequence in self._in_phase[phase] if not sequence.awaits_grammar]

    def all(self) -> list[DecodeSequence]:
        """Every sequence, the finished ones included, new list."""
        return list(self._of_transfer.values())

    @property
    def num_active(self) -> int:
        """Sequences that are not finished."""
        return len(self._of_transfer) - len(self._in_phase[Phase.FINISHED])

    def _leave_phase(self, sequence: DecodeSequence) -> None:
        self.num_running_changes += sequence.phase is Phase.RUNNING
        self._in_phase[sequence.phase].remove(sequence)

    def _insert(self, sequence: DecodeSequence) -> None:
        self.num_running_changes += sequence.phase is Phase.RUNNING
        bisect.insort(self._in_phase[sequence.phase], sequence, key=_age_of)


def _age_of(sequence: DecodeSequence) -> int:
    return sequence.age
