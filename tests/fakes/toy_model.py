"""A model without mathematics: the next token is a hash of every cache entry that it attends to.

A stale, foreign or missing byte anywhere in the cache of a sequence changes its text, so equality with `toy_generate` checks
allocation, transfer, sharing and scheduling together (PROTOCOL: how to test it without a GPU).
"""

import hashlib
from collections.abc import Sequence

from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.request_check import RequestLimits
from glm_runtime.engine.step_plan import StepPlan, StepResult
from kv_transfer.block_pool import BlockPool
from kv_transfer.identity import Incarnation
from kv_transfer.layout import CacheComponent, CacheLayout
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

VOCAB_SIZE = 50
BLOCK_SIZE_TOKENS = 8
ENTRY_BYTES = 8
TOY_LAYOUT = CacheLayout(
    BLOCK_SIZE_TOKENS,
    (CacheComponent("mla", (0,), ENTRY_BYTES, "toy"), CacheComponent("index_key", (0,), ENTRY_BYTES, "toy")),
    "toy",
    "toy",
)


def toy_token(entries: Sequence[bytes], sampling: SamplingParameters, token_index: int) -> int:
    """The token that follows a sequence with these cache entries."""
    digest = hashlib.sha256(b"".join(entries) + f"{sampling.seed},{token_index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def toy_entry(token: int, position: int) -> bytes:
    """What the cache holds for one token."""
    return (token * 100_000 + position + 1).to_bytes(ENTRY_BYTES, "little")


def toy_generate(prompt: Sequence[int], sampling: SamplingParameters) -> list[int]:
    """The answer of a process that does nothing else."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        entries = [toy_entry(token, position) for position, token in enumerate(tokens)]
        tokens.append(toy_token(entries * 2, sampling, len(tokens) - len(prompt)))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Stores entries in the pool's bytes and reads them back through the block table, as a kernel would."""

    def __init__(self, memory: PoolMemory, max_step_tokens: int) -> None:
        self._memory = memory
        self._max_step_tokens = max_step_tokens
        self.num_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        """See `ModelRunner.run`; also checks the rules of a plan."""
        assert 0 < plan.num_tokens <= self._max_step_tokens, f"a step of {plan.num_tokens} tokens"
        assert len({piece.sequence_id for piece in plan.slices}) == len(plan.slices), "a sequence occurs twice in a step"
        self.num_tokens += plan.num_tokens
        for piece in plan.slices:
            for index, token in enumerate(piece.tokens):
                position = piece.start + index
                for component in range(2):
                    self._entry(piece.block_table, position, component)[:] = toy_entry(token, position)
        samples = {}
        for piece in plan.slices:
            if piece.sampling is not None:
                entries = [bytes(self._entry(piece.block_table, at, part)) for part in range(2) for at in range(piece.end)]
                samples[piece.sequence_id] = (toy_token(entries, piece.sampling, piece.token_index),)
        return StepResult(step_number=plan.step_number, samples=samples)

    def _entry(self, block_table: Sequence[int], position: int, component: int) -> memoryview:
        block = self._memory.block(block_table[position // BLOCK_SIZE_TOKENS])
        start = component * BLOCK_SIZE_TOKENS * ENTRY_BYTES + position % BLOCK_SIZE_TOKENS * ENTRY_BYTES
        return block[start : start + ENTRY_BYTES]


def make_toy_model(*, num_blocks: int, max_step_tokens: int, incarnation: Incarnation) -> LoadedModel:
    """A toy with a pool of its own, poisoned."""
    memory = PoolMemory(num_blocks, TOY_LAYOUT.block_bytes)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    memory.write_probe(incarnation)
    return LoadedModel(
        runner=ToyRunner(memory, max_step_tokens),
        layout=TOY_LAYOUT,
        weights_version="toy",
        memory=memory,
        pool=BlockPool(num_blocks, BLOCK_SIZE_TOKENS),
        request_limits=RequestLimits(vocab_size=VOCAB_SIZE, max_model_len_tokens=400, capacity_tokens=num_blocks * BLOCK_SIZE_TOKENS),
        max_step_tokens=max_step_tokens,
    )
