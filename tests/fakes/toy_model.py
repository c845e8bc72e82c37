"""A model without mathematics: the next token is a hash of every cache entry that it attends to.

A stale, foreign or missing byte anywhere in the cache of a sequence changes its text, so equality with `toy_generate` checks
allocation, transfer, sharing and scheduling together (PROTOCOL: how to test it without a GPU).

It may have several ranks: each stores what it has a home for, copies what a plan says, and what is read must be equal on all that have it.

With drafts it also keeps MTP entries, made of a token and the one after it. They must not change any text, so every step checks those of
all positions before it; and its drafts are right about three times in four.
"""

import hashlib
import itertools
from collections.abc import Sequence

import msgspec
from torch import Tensor

from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.request_check import RequestLimits
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.engine.verification import accepted_run
from glm_runtime.sampling.grammar import GrammarState
from kv_transfer.block_pool import BlockPool
from kv_transfer.geometry import ONE_RANK, CacheSharding, rank_incarnation
from kv_transfer.identity import BlockId, Incarnation
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import SamplingParameters, TokenLogprobs
from kv_transfer.pool_memory import PoolMemory
from tests.fakes.toy_grammars import VOCAB_SIZE as VOCAB_SIZE
from tests.fakes.toy_grammars import allowed_tokens, toy_grammars

BLOCK_SIZE_TOKENS = 8
ENTRY_BYTES = 8
TOY_LAYOUT = CacheLayout(
    BLOCK_SIZE_TOKENS,
    (CacheComponent("mla", (0,), ENTRY_BYTES, "toy"), CacheComponent("index_key", (0,), ENTRY_BYTES, "toy")),
    "toy",
    "toy",
)

TOY_LAYOUT_WITH_MTP = CacheLayout(
    BLOCK_SIZE_TOKENS,
    (
        *TOY_LAYOUT.components,
        CacheComponent("mtp_mla", (1,), ENTRY_BYTES, "toy", keyed_by_next_token=True),
        CacheComponent("mtp_index_key", (1,), ENTRY_BYTES, "toy", keyed_by_next_token=True),
    ),
    "toy",
    "toy",
)


def toy_token(entries: Sequence[bytes], sampling: SamplingParameters, token_index: int, mask: Tensor | None = None) -> int:
    """The token that follows a sequence with these cache entries; one of those that the mask allows."""
    digest = hashlib.sha256(b"".join(entries) + f"{sampling.seed},{token_index}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    if mask is None:
        return number % VOCAB_SIZE
    allowed = allowed_tokens(mask)
    return allowed[number % len(allowed)]


def toy_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """What the toy says of a token, wherever it stands."""
    return TokenLogprobs(-float(token), 1, tuple((token + other, -float(token + other)) for other in range(num_top)))


def toy_entry(token: int, position: int) -> bytes:
    """What the cache holds for one token."""
    return (token * 100_000 + position + 1).to_bytes(ENTRY_BYTES, "little")


def toy_mtp_entry(token: int, next_token: int, position: int) -> bytes:
    """What the cache holds of the MTP layer for one token."""
    return hashlib.sha256(f"{token},{next_token},{position}".encode()).digest()[:ENTRY_BYTES]


def toy_hidden(token: int, position: int) -> bytes:
    """What a record carries of the last row."""
    return hashlib.sha256(f"hidden {token},{position}".encode()).digest()


def toy_drafts(
    tokens: Sequence[int],
    sampling: SamplingParameters,
    token_index: int,
    num_drafts: int,
    grammar: GrammarState | None = None,
    run: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Guesses at what follows `tokens`, of which the next is output token `token_index`. run: those that the grammar has not seen yet."""
    known = list(tokens)
    for index in range(token_index, token_index + num_drafts):
        entries = [toy_entry(token, position) for position, token in enumerate(known)]
        mask = grammar.masks([*run, *known[len(tokens) :]])[-1] if grammar is not None else None
        token = toy_token(entries * 2, sampling, index, mask)
        is_wrong = hashlib.sha256(f"{known[-1]},{len(known)}".encode()).digest()[0] % 4 == 0
        known.append((token + is_wrong) % VOCAB_SIZE)
    return tuple(known[len(tokens) :])


def toy_generate(prompt: Sequence[int], sampling: SamplingParameters) -> list[int]:
    """The answer of a process that does nothing else."""
    tokens = list(prompt)
    grammar = toy_grammars().start(sampling.grammar) if sampling.grammar is not None else None
    while len(tokens) - len(prompt) < sampling.max_tokens:
        entries = [toy_entry(token, position) for position, token in enumerate(tokens)]
        mask = grammar.masks()[0] if grammar is not None else None
        tokens.append(toy_token(entries * 2, sampling, len(tokens) - len(prompt), mask))
        assert grammar is None or grammar.accept(tokens[-1:])
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Stores entries in the pools' bytes and reads them back through the block table, as kernels would. memories: by rank."""

    def __init__(
        self, memories: Sequence[PoolMemory], max_step_tokens: int, *, has_mtp: bool = False, sharding: CacheSharding = ONE_RANK
    ) -> None:
        self.memories = memories
        self._sharding = sharding
        self._max_step_tokens = max_step_tokens
        self._has_mtp = has_mtp
        self.num_tokens = 0
        self.num_seeded = 0

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`; also checks the rules of a plan."""
        assert plan.num_tokens or plan.copies, "a step of nothing"
        assert plan.num_tokens <= self._max_step_tokens, f"a step of {plan.num_tokens} tokens"
        assert len({piece.sequence_id for piece in plan.slices}) == len(plan.slices), "a sequence occurs twice in a step"
        self.num_tokens += plan.num_tokens
        for block_id, rank in plan.copies:
            content = bytes(self.memories[rank].block(self._sharding.local_id(block_id)))
            for view in self._views(block_id):
                view[:] = content
        slices = [self._seeded(piece) for piece in plan.slices]
        for piece in slices:
            for index, token in enumerate(piece.tokens):
                position = piece.start + index
                for component in range(2):
                    self._store(piece.block_table, position, component, toy_entry(token, position))
        samples = {piece.sequence_id: self._draw(piece, piece.sampling) for piece in slices if piece.sampling is not None}
        drafts, hidden_states = {}, {}
        for piece in slices:
            if not self._has_mtp:
                continue
            self._follow(piece, samples.get(piece.sequence_id, ()))
            if piece.num_next_drafts:
                assert piece.sampling is not None
                run = samples[piece.sequence_id]
                known = self._tokens(piece.block_table, piece.start + piece.num_given + len(run) - 1)
                drafts[piece.sequence_id] = toy_drafts(
                    [*known, run[-1]], piece.sampling, piece.token_index + len(run), piece.num_next_drafts, piece.grammar, run
                )
            if piece.keeps_hidden:
                hidden_states[piece.sequence_id] = toy_hidden(piece.tokens[-1], piece.end - 1)
        return StepResult(
            step_number=plan.step_number,
            samples=samples,
            drafts=drafts,
            hidden_states=hidden_states,
            logprobs={
                piece.sequence_id: tuple(toy_logprobs(token, piece.sampling.logprobs) for token in samples[piece.sequence_id])
                for piece in slices
                if piece.sampling is not None and piece.sampling.logprobs >= 0
            },
            prompt_logprobs={
                piece.sequence_id: tuple(toy_logprobs(token, piece.num_prompt_logprobs) for token in piece.following)
                for piece in slices
                if piece.following
            },
        )

    def _seeded(self, piece: SequenceSlice) -> SequenceSlice:
        if not piece.num_seed_drafts:
            return piece
        self.num_seeded += 1
        known = self._tokens(piece.block_table, piece.start)
        assert piece.seed_hidden == toy_hidden(known[-1], piece.start - 1), "the hidden state belongs to another row"
        assert piece.sampling is not None
        drafts = toy_drafts([*known, *piece.tokens], piece.sampling, piece.token_index, piece.num_seed_drafts, piece.grammar)
        return msgspec.structs.replace(piece, tokens=(*piece.tokens, *drafts), num_drafts=len(drafts), num_seed_drafts=0)

    def _draw(self, piece: SequenceSlice, sampling: SamplingParameters) -> tuple[int, ...]:
        drawn = []
        masks = piece.grammar.masks(piece.tokens[piece.num_given :]) if piece.grammar is not None else None
        for number in range(piece.num_drafts + 1):
            end = piece.start + piece.num_given + number
            entries = [self._entry(piece.block_table, at, part) for part in range(2) for at in range(end)]
            drawn.append(toy_token(entries, sampling, piece.token_index + number, masks[number] if masks is not None else None))
        return accepted_run(drawn, piece.tokens[piece.num_given :])

    def _follow(self, piece: SequenceSlice, run: tuple[int, ...]) -> None:
        """Check the MTP entries of every position before the step, and store those of the rows that stand."""
        known = self._tokens(piece.block_table, piece.start)
        for position, (token, after) in enumerate(itertools.pairwise([*known, piece.tokens[0]])):
            for component in (2, 3):
                found = self._entry(piece.block_table, position, component)
                assert found == toy_mtp_entry(token, after, position), f"{piece.sequence_id}: MTP entry {component} of position {position}"
        if piece.sampling is None:
            assert piece.next_token is not None
            run = (piece.next_token,)
        standing = [*piece.tokens[: piece.num_given], *run]
        for index, (token, after) in enumerate(itertools.pairwise(standing)):
            for component in (2, 3):
                position = piece.start + index
                self._store(piece.block_table, position, component, toy_mtp_entry(token, after, position))

    def _tokens(self, block_table: Sequence[int], end: int) -> list[int]:
        """The tokens of positions [0, end), as the cache has them."""
        numbers = [int.from_bytes(self._entry(block_table, position, 0), "little") for position in range(end)]
        return [(number - 1 - position) // 100_000 for position, number in enumerate(numbers)]

    def _entry(self, block_table: Sequence[int], position: int, component: int) -> bytes:
        found = {bytes(view) for view in self._places(block_table, position, component)}
        assert len(found) == 1, f"ranks have different bytes of position {position}"
        return found.pop()

    def _store(self, block_table: Sequence[int], position: int, component: int, entry: bytes) -> None:
        for view in self._places(block_table, position, component):
            view[:] = entry

    def _places(self, block_table: Sequence[int], position: int, component: int) -> list[memoryview]:
        """Where the ranks that have it keep one entry."""
        block_id = BlockId(block_table[position // BLOCK_SIZE_TOKENS])
        assert self._sharding.has(self._sharding.serving_rank(position // BLOCK_SIZE_TOKENS), block_id), "a block is on another home"
        start = component * BLOCK_SIZE_TOKENS * ENTRY_BYTES + position % BLOCK_SIZE_TOKENS * ENTRY_BYTES
        return [view[start : start + ENTRY_BYTES] for view in self._views(block_id)]

    def _views(self, block_id: BlockId) -> list[memoryview]:
        return [self.memories[rank].block(self._sharding.local_id(block_id)) for rank in self._sharding.ranks(block_id)]


def make_toy_model(
    *, num_blocks: int, max_step_tokens: int, incarnation: Incarnation, max_drafts: int = 0, sharding: CacheSharding = ONE_RANK
) -> LoadedModel:
    """A toy with a pool of its own, poisoned. num_blocks: over all homes, rounded up to as many of each."""
    layout = TOY_LAYOUT_WITH_MTP if max_drafts else TOY_LAYOUT
    num_local = -(-num_blocks // sharding.num_homes)
    num_blocks = num_local * sharding.num_homes
    memories = [PoolMemory(num_local, layout.block_bytes) for _ in range(sharding.num_ranks)]
    for rank, memory in enumerate(memories):
        memory.buffer[:] = b"\xff" * len(memory.buffer)
        memory.write_probe(rank_incarnation(incarnation, rank))
    return LoadedModel(
        runner=ToyRunner(memories, max_step_tokens, has_mtp=max_drafts > 0, sharding=sharding),
        layout=layout,
        weights_version="toy",
        memory=memories[0],
        pool=BlockPool(num_blocks, BLOCK_SIZE_TOKENS, sharding.num_homes),
        request_limits=RequestLimits(vocab_size=VOCAB_SIZE, max_model_len_tokens=400, capacity_tokens=num_blocks * BLOCK_SIZE_TOKENS),
        max_step_tokens=max_step_tokens,
        max_drafts=max_drafts,
        hidden_state_bytes=len(toy_hidden(0, 0)) if max_drafts else None,
        grammars=toy_grammars(),
        sharding=sharding,
    )
