"""Generation in one process, without workers: what the cluster's answers are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from kv_transfer.errors import PromptTooLong
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory


@dataclass(slots=True)
class _Sequence:
    """One prompt on its way: everything below `num_computed` is in the cache."""

    sequence_id: SequenceId
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    block_table: list[BlockId]
    num_computed: int = 0
    is_finished: bool = False
    output: list[int] = field(default_factory=list)

    def next_slice(self, chunk_tokens: int) -> SequenceSlice:
        """The next chunk of the prompt, or one decode row."""
        end = min(self.num_computed + chunk_tokens, len(self.tokens))
        return SequenceSlice(
            sequence_id=self.sequence_id,
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
) -> list[list[int]]:
    """The output tokens of each prompt, the stop token included when there is one.

    chunk_tokens: most prompt tokens of a sequence per step (None: as many as the step may have). max_batch_sequences: most
    sequences at a time; the next ones start when all of these have ended. Results depend on neither in deterministic mode.
    Raises PromptTooLong when a prompt and its max_tokens exceed the model's length.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParameters) else list(sampling)
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), max_batch_sequences):
        batch = slice(first, first + max_batch_sequences)
        outputs += _generate_batch(runtime, prompts[batch], each[batch], chunk_tokens)
    return outputs


def _generate_batch(
    runtime: GlmRuntime, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParameters], chunk_tokens: int | None
) -> list[list[int]]:
    sequences, num_blocks = _place(runtime, prompts, sampling)
    runner = runtime.attach(PoolMemory(num_blocks, runtime.layout.block_bytes))
    step_number = 0
    while running := [sequence for sequence in sequences if not sequence.is_finished]:
        _step(runner, running, step_number, runtime.runtime_config.max_step_tokens, chunk_tokens)
        step_number += 1
    return [sequence.output for sequence in sequences]


def _place(runtime: GlmRuntime, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParameters]) -> tuple[list[_Sequence], int]:
    """Give each prompt its own run of blocks, long enough for its last token."""
    sequences: list[_Sequence] = []
    next_block = 0
    for number, (prompt, given) in enumerate(zip(prompts, sampling, strict=True)):
        length = len(prompt) + given.max_tokens
        if length > runtime.max_model_len_tokens:
            raise PromptTooLong(f"prompt {number} has {len(prompt)} tokens and asks for {given.max_tokens} more; the limit is "
                                f"{runtime.max_model_len_tokens}")  # fmt: skip
        num_blocks = -(-length // runtime.layout.block_size_tokens)
        table = [BlockId(block) for block in range(next_block, next_block + num_blocks)]
        sequences.append(_Sequence(SequenceId(str(number)), list(prompt), len(prompt), given, table))
        next_block += num_blocks
    return sequences, next_block


def _step(runner: ModelRunner, running: Sequence[_Sequence], step_number: int, budget_tokens: int, chunk_tokens: int | None) -> None:
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
            sequence.append(result.samples[sequence.sequence_id])
