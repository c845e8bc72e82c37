"""Generation in one process, without workers: what the cluster's answers are compared with."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from glm_runtime.engine.draft_meter import DraftMeter
from glm_runtime.engine.draft_stop import StopRule
from glm_runtime.engine.grammar_desk import load_grammars
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.engine.step_runner import run_empty_steps
from glm_runtime.parallel.decode_context import group_block, home_of
from glm_runtime.runtime import GlmRuntime
from glm_runtime.sampling.grammar import GrammarState
from glm_runtime.sampling.history import TokenHistory
from glm_runtime.sampling.parameters import reads_history
from kv_transfer.errors import InvalidRequest, PromptTooLong
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

OnToken = Callable[[int, int], bool]
"""Called with (prompt number, new token) after each draw; False ends that prompt's output with this token."""


@dataclass(slots=True)
class _Sequence:
    """One prompt on its way: everything below `num_computed` is in the cache. drafts: guesses at what follows `tokens`."""

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    block_table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    is_finished: bool = False
    output: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    history: TokenHistory | None = None
    grammar: GrammarState | None = None

    def __post_init__(self) -> None:
        if reads_history(self.sampling):
            self.history = TokenHistory(self.tokens)

    def num_blocks(self, block_size_tokens: int) -> int:
        """Blocks for the prompt and every token that may follow."""
        return -(-(self.num_prompt_tokens + self.sampling.max_tokens) // block_size_tokens)

    def next_slice(self, chunk_tokens: int, num_next_drafts: int) -> SequenceSlice:
        """The next chunk of the prompt, or one decode row and the drafts that fit."""
        end = min(self.num_computed + chunk_tokens, len(self.tokens))
        is_whole = end == len(self.tokens)
        num_left = self.sampling.max_tokens - len(self.output)
        drafts = self.drafts[: max(min(chunk_tokens - (end - self.num_computed), num_left - 1), 0)] if is_whole else ()
        return SequenceSlice(
            sequence_id=SequenceId(str(self.number)),
            tokens=[*self.tokens[self.num_computed : end], *drafts],
            start=self.num_computed,
            block_table=self.block_table,
            sampling=self.sampling if is_whole else None,
            token_index=len(self.output),
            history=self.history,
            grammar=self.grammar,
            num_drafts=len(drafts),
            next_token=None if is_whole else self.tokens[end],
            num_next_drafts=num_next_drafts if num_left > 2 else 0,
        )

    def take(self, piece: SequenceSlice, result: StepResult, on_token: OnToken | None) -> None:
        """What a step has computed of this sequence. Rows of drafts that did not hold are computed anew where they lie."""
        self.num_computed = piece.start + piece.num_given
        if piece.sampling is None:
            return
        run = result.samples[piece.sequence_id]
        self.num_computed += len(run) - 1
        self.drafts = result.drafts.get(piece.sequence_id, ())
        for token in run:
            self._append(token)
            if on_token is not None and not on_token(self.number, token):
                self.is_finished = True
            if self.is_finished:
                return

    def _append(self, token: int) -> None:
        self.output.append(token)
        self.tokens.append(token)
        if self.history is not None:
            self.history.extend((token,))
        if self.grammar is not None and not self.grammar.accept((token,)):
            raise InvalidRequest(f"prompt {self.number}: its grammar cannot go on: {self.grammar.error}")
        self.is_finished = token in self.sampling.stop_token_ids or len(self.output) == self.sampling.max_tokens


def generate(
    runtime: GlmRuntime,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
    *,
    chunk_tokens: int | None = None,
    max_batch_sequences: int = 16,
    max_drafts: int | None = None,
    drafts: DraftMeter | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """The output tokens of each prompt, the stop token included when there is one.

    chunk_tokens: most prompt tokens of a sequence per step (None: as many as the step may have). max_batch_sequences: most
    sequences at a time; the next one starts when one has ended and its blocks fit. max_drafts: tokens guessed ahead of each step (None:
    as the runtime is configured; always so many, but for `runtime.min_draft_probability`). Results depend on none of them in deterministic
    mode with `runtime.verification` "exact". drafts: counts them.
    Raises PromptTooLong, before anything is computed, when a prompt and its max_tokens exceed the model's length or the pool, and
    InvalidRequest for a grammar that cannot be used.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParameters) else list(sampling)
    block_size_tokens = runtime.layout.block_size_tokens
    sequences = [
        _Sequence(number, list(prompt), len(prompt), given) for number, (prompt, given) in enumerate(zip(prompts, each, strict=True))
    ]
    for sequence in sequences:
        _check_fits(runtime, sequence)
    _start_grammars(runtime, sequences)
    needs = sorted((-(-sequence.num_blocks(block_size_tokens) // runtime.num_homes) for sequence in sequences), reverse=True)
    num_blocks = max(1, min(runtime.num_blocks, sum(needs[:max_batch_sequences])))
    runner = runtime.attach(PoolMemory(num_blocks, runtime.layout.block_bytes))
    free = _FreeBlocks(num_blocks, runtime.num_homes)
    num_drafts = runtime.max_drafts if max_drafts is None else min(max_drafts, runtime.max_drafts)
    least = runtime.runtime_config.min_draft_probability
    rule = StopRule(row=least) if least else None
    waiting, running = deque(sequences), list[_Sequence]()
    step_number = 0
    while waiting or running:
        while waiting and len(running) < max_batch_sequences and free.has(waiting[0].num_blocks(block_size_tokens)):
            sequence = waiting.popleft()
            sequence.block_table = free.take(sequence.num_blocks(block_size_tokens))
            running.append(sequence)
        planned, result = _step(runner, running, step_number, runtime.runtime_config.max_step_tokens, chunk_tokens, num_drafts, rule)
        for sequence, piece in planned:
            if drafts is not None and piece.num_drafts:
                drafts.count(num_drafted=piece.num_drafts, num_accepted=len(result.samples[piece.sequence_id]) - 1)
            sequence.take(piece, result, on_token)
        for sequence in running:
            if sequence.is_finished:
                free.give(sequence.block_table)
        running = [sequence for sequence in running if not sequence.is_finished]
        step_number += 1
    run_empty_steps(runner)
    return [sequence.output for sequence in sequences]


class _FreeBlocks:
    """Free blocks by home: where ranks share a cache, block i of a sequence is one of rank i mod num_homes."""

    def __init__(self, num_blocks: int, num_homes: int) -> None:
        self._free = [[group_block(block, home, num_homes) for block in reversed(range(num_blocks))] for home in range(num_homes)]

    def has(self, count: int) -> bool:
        """Whether a sequence of so many blocks fits."""
        num_homes = len(self._free)
        return all(len(free) >= -(-(count - home) // num_homes) for home, free in enumerate(self._free))

    def take(self, count: int) -> list[BlockId]:
        """The block table of a sequence."""
        return [self._free[place % len(self._free)].pop() for place in range(count)]

    def give(self, blocks: Sequence[BlockId]) -> None:
        """Blocks of a sequence that has ended."""
        for block in blocks:
            self._free[home_of(block, len(self._free))].append(block)


def _start_grammars(runtime: GlmRuntime, sequences: Sequence[_Sequence]) -> None:
    if all(sequence.sampling.grammar is None for sequence in sequences):
        return
    grammars = load_grammars(runtime.runtime_config.checkpoint, runtime.config)
    if grammars is None:
        raise InvalidRequest("this checkpoint's tokenizer cannot be used for grammars")
    for sequence in sequences:
        if sequence.sampling.grammar is not None:
            grammars.check(sequence.sampling)
            sequence.grammar = grammars.start(sequence.sampling.grammar)


def _check_fits(runtime: GlmRuntime, sequence: _Sequence) -> None:
    """Raise PromptTooLong for what could never run here."""
    asked = f"prompt {sequence.number} has {sequence.num_prompt_tokens} tokens and asks for {sequence.sampling.max_tokens} more"
    if sequence.num_prompt_tokens + sequence.sampling.max_tokens > runtime.max_model_len_tokens:
        raise PromptTooLong(f"{asked}; the limit is {runtime.max_model_len_tokens}")
    num_blocks = runtime.num_homes * runtime.num_blocks
    if sequence.num_blocks(runtime.layout.block_size_tokens) > num_blocks:
        raise PromptTooLong(f"{asked}; the cache holds {num_blocks * runtime.layout.block_size_tokens}")


def _step(
    runner: ModelRunner,
    running: Sequence[_Sequence],
    step_number: int,
    budget_tokens: int,
    chunk_tokens: int | None,
    num_drafts: int,
    rule: StopRule | None,
) -> tuple[list[tuple[_Sequence, SequenceSlice]], StepResult]:
    """One step over as many sequences as the budget allows, decode rows and chunks mixed."""
    planned: list[tuple[_Sequence, SequenceSlice]] = []
    for sequence in sorted(running, key=lambda sequence: len(sequence.tokens) - sequence.num_computed):
        if budget_tokens > 0:
            piece = sequence.next_slice(min(budget_tokens, chunk_tokens or budget_tokens), num_drafts)
            planned.append((sequence, piece))
            budget_tokens -= len(piece.tokens)
    result = runner.run(StepPlan(step_number=step_number, slices=tuple(piece for _, piece in planned), stop_rule=rule))
    return planned, result
