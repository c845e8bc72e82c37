"""Generation in one process, without workers: what the cluster's answers are compared with."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from kv_transfer.errors import PromptTooLong
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

OnToken = Callable[[int, int], bool]
"""Called with (prompt number, new token) after each draw; False ends that prompt's output with this token."""


@dataclass(slots=True)
class _Sequence:
    """One prompt on its way: everything below `num_computed` is in the cache."""

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    block_table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    is_finished: bool = False
    output: list[int] = field(default_factory=list)

    def num_blocks(self, block_size_tokens: int) -> int:
        """Blocks for the prompt and every token that may follow."""
        return -(-(self.num_prompt_tokens + self.sampling.max_tokens) // block_size_tokens)

    def next_slice(self, chunk_tokens: int) -> SequenceSlice:
        """The next chunk of the prompt, or one decode row."""
        end = min(self.num_computed + chunk_tokens, len(self.tokens))
        return SequenceSlice(
            sequence_id=SequenceId(str(self.number)),
            tokens=self.tokens[self.num_computed : end],
            start=self.num_computed,
            block_table=self.block_table,
            sampling=self.sampling if end == len(self.tokens) else None,
            token_index=len(self.output),
        )

    def append(self, token: int) -> None:
        self.output.append(token)
        self.tokens.append(token)
        self.is_finished = token in self.sampling.stop_token_ids or len(self.output) == self.sampling.max_tokens


def generate(
    runtime: GlmRuntime,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
    *,
    chunk_tokens: int | None = None,
    max_batch_sequences: int = 16,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """The output tokens of each prompt, the stop token included when there is one.

    chunk_tokens: most prompt tokens of a sequence per step (None: as many as the step may have). max_batch_sequences: most
    sequences at a time; the next one starts when one has ended and its blocks fit. Results depend on neither in deterministic mode.
    Raises PromptTooLong, before anything is computed, when a prompt and its max_tokens exceed the model's length or the pool.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParameters) else list(sampling)
    block_size_tokens = runtime.layout.block_size_tokens
    sequences = [
        _Sequence(number, list(prompt), len(prompt), given) for number, (prompt, given) in enumerate(zip(prompts, each, strict=True))
    ]
    for sequence in sequences:
        _check_fits(runtime, sequence)
    needs = sorted((sequence.num_blocks(block_size_tokens) for sequence in sequences), reverse=True)
    if not needs:
        return []
    num_blocks = min(runtime.num_blocks, sum(needs[:max_batch_sequences]))
    runner = runtime.attach(PoolMemory(num_blocks, runtime.layout.block_bytes))
    free = [BlockId(block) for block in reversed(range(num_blocks))]
    waiting, running = deque(sequences), list[_Sequence]()
    step_number = 0
    while waiting or running:
        while waiting and len(running) < max_batch_sequences and waiting[0].num_blocks(block_size_tokens) <= len(free):
            sequence = waiting.popleft()
            sequence.block_table = [free.pop() for _ in range(sequence.num_blocks(block_size_tokens))]
            running.append(sequence)
        _step(runner, running, step_number, runtime.runtime_config.max_step_tokens, chunk_tokens, on_token)
        for sequence in running:
            if sequence.is_finished:
                free += sequence.block_table
        running = [sequence for sequence in running if not sequence.is_finished]
        step_number += 1
    return [sequence.output for sequence in sequences]


def _check_fits(runtime: GlmRuntime, sequence: _Sequence) -> None:
    """Raise PromptTooLong for what could never run here."""
    asked = f"prompt {sequence.number} has {sequence.num_prompt_tokens} tokens and asks for {sequence.sampling.max_tokens} more"
    if sequence.num_prompt_tokens + sequence.sampling.max_tokens > runtime.max_model_len_tokens:
        raise PromptTooLong(f"{asked}; the limit is {runtime.max_model_len_tokens}")
    if sequence.num_blocks(runtime.layout.block_size_tokens) > runtime.num_blocks:
        raise PromptTooLong(f"{asked}; the cache holds {runtime.num_blocks * runtime.layout.block_size_tokens}")


def _step(
    runner: ModelRunner,
    running: Sequence[_Sequence],
    step_number: int,
    budget_tokens: int,
    chunk_tokens: int | None,
    on_token: OnToken | None,
) -> None:
    """One step over as many sequences as the budget allows, decode rows and chunks mixed."""
    planned: list[tuple[_Sequence, SequenceSlice]] = []
    for sequence in sorted(running, key=lambda sequence: len(sequence.tokens) - sequence.num_computed):
        if budget_tokens > 0:
            piece = sequence.next_slice(min(budget_tokens, chunk_tokens or budget_tokens))
            planned.append((sequence, piece))
            budget_tokens -= len(piece.tokens)
    result = runner.run(StepPlan(step_number=step_number, slices=tuple(piece for _, piece in planned)))
    for sequence, piece in planned:
        sequence.num_computed = piece.end
        if piece.sampling is not None:
            token = result.samples[piece.sequence_id]
            sequence.append(token)
            if on_token is not None and not on_token(sequence.number, token):
                sequence.is_finished = True
