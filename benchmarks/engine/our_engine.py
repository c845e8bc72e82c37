"""Our engine as it serves, behind `engine_process.py`: a runner over a paged pool, step plans, greedy sampling.

`python -m benchmarks.engine.our_engine CHECKPOINT NUMERICS CACHE_FORMAT POOL_TOKENS THREADS`. Two more commands:

    experts IDS      as `decode`, but answers with the mean number of distinct experts that a MoE layer's rows were sent to in a step
    bandwidth        bytes a second that this process's threads read, as `benchmarks/read_bandwidth.py` measures
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engine.command_loop import Engine, serve
from benchmarks.read_bandwidth import read_bandwidth
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.moe import MixtureOfExperts
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import CacheFormatChoice, NumericsChoice, RuntimeConfig
from glm_runtime.stored_tensors import stored_tensors
from glm_runtime.tensor_reader import TensorReader
from glm_runtime.tensor_table import tensor_table
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.messages import SamplingParameters
from kv_transfer.pool_memory import PoolMemory

GREEDY = SamplingParameters(max_tokens=1, seed=0, temperature=0.0)
SPARE_TOKENS = 64


class OurEngine:
    """A model and a pool of blocks, which sequences get in order: the first sequence's blocks first."""

    def __init__(self, checkpoint: Path, numerics: NumericsChoice, cache_format: CacheFormatChoice, pool_tokens: int, threads: int) -> None:
        self._runtime = GlmRuntime.load(
            RuntimeConfig(checkpoint=checkpoint, numerics=numerics, cache_format=cache_format, num_threads=threads)
        )
        self._pool = PoolMemory(-(-pool_tokens // self._block_size), self._runtime.layout.block_bytes)
        self._runner = self._runtime.attach(self._pool)
        self._tables: list[list[BlockId]] = []
        self._filled = 0

    def log_probs(self, tokens: list[int]) -> list[float]:
        """Of the token after the prompt."""
        self._allocate(1, len(tokens))
        with torch.inference_mode():
            hidden = self._runner.forward(self._prompt_plans(tokens)[-1])
            logits = self._runner.model.logits(hidden[-1:])
        return logits[0].float().log_softmax(-1).tolist()

    def prefill(self, tokens: list[int]) -> float:
        """Seconds."""
        self._allocate(1, len(tokens))
        started_s = time.perf_counter()
        for plan in self._prompt_plans(tokens):
            self._runner.run(plan)
        return time.perf_counter() - started_s

    def fill(self, batch: int, tokens: list[int]) -> None:
        """One sequence computed, its blocks copied."""
        self._allocate(batch, len(tokens))
        for plan in self._prompt_plans(tokens):
            self._runner.run(plan)
        self._filled = len(tokens)
        for table in self._tables[1:]:
            for source, target in zip(self._tables[0], table, strict=True):
                self._pool.block(target)[:] = self._pool.block(source)

    def decode(self, steps: list[list[int]]) -> list[float]:
        """Seconds of each step."""
        return [self._run_step(self._runner, number, tokens) for number, tokens in enumerate(steps)]

    def experts(self, steps: list[list[int]]) -> float:
        """Distinct experts a MoE layer and step."""
        runner, counts = self._counting_runner()
        for number, tokens in enumerate(steps):
            self._run_step(runner, number, tokens)
        return sum(counts) / len(counts)

    @property
    def batch(self) -> int:
        """Sequences that are filled."""
        return len(self._tables)

    @property
    def _block_size(self) -> int:
        return self._runtime.layout.block_size_tokens

    def _allocate(self, batch: int, num_tokens: int) -> None:
        each = -(-(num_tokens + SPARE_TOKENS) // self._block_size)
        if each * batch > self._pool.num_blocks:
            raise ValueError(f"{batch} sequences of {each} blocks do not fit into {self._pool.num_blocks}")
        self._tables = [[BlockId(sequence * each + block) for block in range(each)] for sequence in range(batch)]

    def _prompt_plans(self, tokens: list[int]) -> list[StepPlan]:
        size = self._runtime.runtime_config.max_step_tokens
        return [
            StepPlan(step_number=0, slices=(self._slice(0, tokens[start : start + size], start, is_last=start + size >= len(tokens)),))
            for start in range(0, len(tokens), size)
        ]

    def _run_step(self, runner: ModelRunner, number: int, tokens: list[int]) -> float:
        started_s = time.perf_counter()
        start = self._filled + number
        slices = tuple(self._slice(sequence, [token], start, is_last=True) for sequence, token in enumerate(tokens))
        runner.run(StepPlan(step_number=number, slices=slices))
        return time.perf_counter() - started_s

    def _slice(self, sequence: int, tokens: list[int], start: int, *, is_last: bool) -> SequenceSlice:
        return SequenceSlice(
            sequence_id=SequenceId(str(sequence)),
            tokens=tokens,
            start=start,
            block_table=self._tables[sequence],
            sampling=GREEDY if is_last else None,
        )

    def _counting_runner(self) -> tuple[ModelRunner, list[int]]:
        """A runner of the same weights whose MoE layers note how many experts they need."""
        counts: list[int] = []
        layers = []
        table = tensor_table(self._runtime.config)
        with TensorReader(stored_tensors(self._runtime.runtime_config.checkpoint)) as reader:
            for number, layer in enumerate(self._runtime.model.layers):
                if isinstance(layer.mlp, MixtureOfExperts):
                    router, bias = (
                        reader.wide(name, table[name]).float()
                        for name in (f"model.layers.{number}.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias"))
                    )
                    kept = {field.name: getattr(layer.mlp, field.name) for field in fields(layer.mlp)}
                    layers.append(replace(layer, mlp=_CountingExperts(**kept, router=router, bias=bias, counts=counts)))
                else:
                    layers.append(layer)
        model = replace(self._runtime.model, layers=tuple(layers))
        return ModelRunner(model, self._runner.cache), counts


@dataclass(frozen=True, kw_only=True, slots=True)
class _CountingExperts(MixtureOfExperts):
    """Counts the distinct experts of each call from the checkpoint's router. Models without expert groups."""

    router: Tensor
    bias: Tensor
    counts: list[int]

    def forward(self, hidden: Tensor, forced_experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = (hidden.float() @ self.router.T).sigmoid() + self.bias
        self.counts.append(int(scores.topk(self.config.num_experts_per_tok, dim=-1).indices.unique().numel()))
        return MixtureOfExperts.forward(self, hidden, forced_experts)


def _obey(engine: Engine, command: str, numbers: list[int]) -> Sequence[float]:
    assert isinstance(engine, OurEngine)
    if command == "bandwidth":
        return (read_bandwidth(),)
    if command == "experts":
        return (engine.experts([numbers[start : start + engine.batch] for start in range(0, len(numbers), engine.batch)]),)
    raise ValueError(f"unknown command {command}")


if __name__ == "__main__":
    checkpoint, numerics, cache_format, pool_tokens, threads = sys.argv[1:]
    serve(lambda: OurEngine(Path(checkpoint), numerics, cache_format, int(pool_tokens), int(threads)), _obey)  # type: ignore[arg-type]
