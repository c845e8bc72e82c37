"""Runs prompts through the runtime by a given schedule of chunks and steps, and collects every row's logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_runtime.config import GlmConfig
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.model import ForcedChoices
from glm_runtime.runtime import GlmRuntime
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.pool_memory import PoolMemory
from tests.conformance.glm_oracle import OracleRun

Step = Sequence[tuple[int, int]]
"""One step: (which prompt, how many of its tokens)."""


def chunked(length: int, chunk: int) -> list[Step]:
    """One prompt in chunks of `chunk`."""
    return [[(0, min(chunk, length - start))] for start in range(0, length, chunk)]


def decoded(length: int, num_prompt_tokens: int) -> list[Step]:
    """One prompt of `num_prompt_tokens`, then token by token."""
    return [[(0, num_prompt_tokens)], *[[(0, 1)]] * (length - num_prompt_tokens)]


def mixed(lengths: Sequence[int], chunks: Sequence[int]) -> list[Step]:
    """All prompts at once, each in chunks of its own size, so that prefill chunks and single rows share steps."""
    left = list(lengths)
    steps: list[Step] = []
    while any(left):
        step = [(prompt, min(chunks[prompt], tokens)) for prompt, tokens in enumerate(left) if tokens]
        for prompt, count in step:
            left[prompt] -= count
        steps.append(step)
    return steps


@dataclass
class ScheduledRuntime:
    """A runtime over a pool full of NaN, whose blocks are handed out in an order from `seed`."""

    runtime: GlmRuntime
    seed: int = 0
    spare_blocks: int = 3

    def logits(self, prompts: Sequence[Sequence[int]], steps: Sequence[Step], forced: Sequence[OracleRun] | None = None) -> list[Tensor]:
        """Logits [S, vocabulary] of each prompt. forced: the oracle's runs, whose close choices are then taken over."""
        size = self.runtime.layout.block_size_tokens
        needed = [-(-len(prompt) // size) for prompt in prompts]
        runner = self._poisoned_runner(sum(needed) + self.spare_blocks)
        order = torch.randperm(sum(needed) + self.spare_blocks, generator=torch.Generator().manual_seed(self.seed)).tolist()
        tables = [[BlockId(order.pop()) for _ in range(count)] for count in needed]
        done = [0] * len(prompts)
        rows: list[list[Tensor]] = [[] for _ in prompts]
        for number, step in enumerate(steps):
            plan = StepPlan(step_number=number, slices=tuple(_slice(prompts, tables, done, *part) for part in step))
            choices = _forced_choices(self.runtime.config, forced, step, done) if forced is not None else None
            with torch.inference_mode():
                logits = runner.model.logits(runner.forward(plan, choices))
            for (prompt, count), part in zip(step, logits.split([count for _, count in step]), strict=True):
                rows[prompt].append(part)
                done[prompt] += count
        return [torch.cat(parts) for parts in rows]

    def _poisoned_runner(self, num_blocks: int) -> ModelRunner:
        memory = PoolMemory(num_blocks, self.runtime.layout.block_bytes)
        memory.buffer[:] = b"\xff" * len(memory.buffer)  # NaN as bf16 and as fp32
        return self.runtime.attach(memory)


def _slice(
    prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[BlockId]], done: Sequence[int], prompt: int, count: int
) -> SequenceSlice:
    start = done[prompt]
    tokens = prompts[prompt][start : start + count]
    return SequenceSlice(sequence_id=SequenceId(str(prompt)), tokens=tokens, start=start, block_table=tables[prompt])


def _forced_choices(config: GlmConfig, forced: Sequence[OracleRun], step: Step, done: Sequence[int]) -> ForcedChoices:
    def gather(layer: int, of: str, close_of: str, width: int) -> Tensor:
        parts = []
        for prompt, count in step:
            rows = slice(done[prompt], done[prompt] + count)
            chosen = getattr(forced[prompt], of)[layer][rows]
            is_close = getattr(forced[prompt], close_of)[layer][rows]
            padded = torch.nn.functional.pad(chosen, (0, width - chosen.shape[1]), value=-1)
            parts.append(torch.where(is_close[:, None], padded, -1))
        return torch.cat(parts)

    return ForcedChoices(
        lists={layer: gather(layer, "lists", "close_lists", config.index_topk) for layer in config.indexing_layers},
        experts={layer: gather(layer, "experts", "close_experts", config.num_experts_per_tok) for layer in config.moe_layers},
    )
