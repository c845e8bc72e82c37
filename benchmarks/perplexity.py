"""What a cache format costs in quality: perplexity of the shipped checkpoint on its held-out texts, against an fp32 cache.

Each text is computed as a prompt, keys rounded into the cache and read back; scored are the tokens of its completion. Deterministic
numerics, so that nothing but the format differs between rows.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import glm_runtime
from benchmarks.report import Row, run_benchmark
from glm_runtime.engine.runner import ModelRunner
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.identity import BlockId, SequenceId
from kv_transfer.pool_memory import PoolMemory

CHECKPOINT = Path(glm_runtime.__file__).parent / "tiny"
CHUNK_TOKENS = 512
QUICK_STRIDE = 12
"""--quick scores every twelfth text."""

FORMATS: Mapping[str, Mapping[str, str]] = {  # the first is what the others are compared with
    "fp32, index fp32": {"cache_format": "fp32"},
    "bf16, index bf16": {"cache_format": "bf16"},
    "bf16, index fp8": {"cache_format": "bf16", "index_format": "fp8"},
    "fp8_e4m3, index fp8": {"cache_format": "fp8_e4m3"},
    "fp8_ds_mla, index fp8": {"cache_format": "fp8_ds_mla"},
    "fp8_ds_mla, index mxfp4": {"cache_format": "fp8_ds_mla", "index_format": "mxfp4"},
    "nvfp4_ds_mla, index fp8": {"cache_format": "nvfp4_ds_mla"},
    "nvfp4_ds_mla, index mxfp4": {"cache_format": "nvfp4_ds_mla", "index_format": "mxfp4"},
}
GOALS_PERCENT: Mapping[str, float] = {"fp32": 0.0, "bf16": 0.1, "fp8_e4m3": 0.5, "fp8_ds_mla": 0.5, "nvfp4_ds_mla": 1.5}
"""Most that a main format may change perplexity, in either direction."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a prompt and its completion, of which the first `num_prompt_tokens` are not scored."""

    kind: str
    tokens: list[int]
    num_prompt_tokens: int


def read_texts(stride: int = 1) -> list[Text]:
    """Every `stride`-th held-out text of the shipped checkpoint."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = []
    for line in (CHECKPOINT / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::stride]:
        entry = json.loads(line)
        prompt, completion = (tokenizer.encode(entry[part], add_special_tokens=False).ids for part in ("prompt", "completion"))
        texts.append(Text(entry["kind"], prompt + completion, len(prompt)))
    return texts


def predict(runtime: GlmRuntime, texts: Sequence[Text]) -> list[Tensor]:
    """Log-probabilities [completion, vocabulary] fp64 of each text's completion tokens."""
    size = runtime.layout.block_size_tokens
    table = [BlockId(block) for block in range(-(-max(len(text.tokens) for text in texts) // size))]
    runner = runtime.attach(PoolMemory(len(table), runtime.layout.block_bytes))  # one pool for all texts: pools are never unmapped
    with torch.inference_mode():
        return [_predict_text(runner, table, text) for text in texts]


def negative_log_likelihood(texts: Sequence[Text], predictions: Sequence[Tensor]) -> float:
    """Nats a completion token."""
    wanted = [torch.tensor(text.tokens[text.num_prompt_tokens :]) for text in texts]
    return -float(torch.cat([rows.gather(1, tokens[:, None]) for rows, tokens in zip(predictions, wanted, strict=True)]).mean())


def divergence(base: Sequence[Tensor], predictions: Sequence[Tensor]) -> float:
    """KL(base || predictions), nats a completion token: what changed, also where the likelihood of the text happens to stay."""
    each = [(wanted.exp() * (wanted - rows)).sum(1) for wanted, rows in zip(base, predictions, strict=True)]
    return float(torch.cat(each).mean())


def change_percent(nats: float, base_nats: float) -> float:
    """By how much perplexity exceeds the base's."""
    return 100.0 * math.expm1(nats - base_nats)


def load_runtime(choices: Mapping[str, str]) -> GlmRuntime:
    """The shipped checkpoint in deterministic numerics with these cache formats."""
    return GlmRuntime.load(RuntimeConfig(checkpoint=CHECKPOINT, **choices))  # type: ignore[arg-type]


def _predict_text(runner: ModelRunner, table: list[BlockId], text: Text) -> Tensor:
    hidden = []
    for start in range(0, len(text.tokens), CHUNK_TOKENS):
        tokens = text.tokens[start : start + CHUNK_TOKENS]
        piece = SequenceSlice(sequence_id=SequenceId("text"), tokens=tokens, start=start, block_table=table, sampling=None)
        hidden.append(runner.forward(StepPlan(step_number=0, slices=(piece,))))
    logits = runner.model.logits(torch.cat(hidden)[text.num_prompt_tokens - 1 : -1])
    return logits.double().log_softmax(-1)


def measure(quick: bool) -> list[Row]:
    """Three rows per format: change of perplexity, divergence, and the likelihoods by kind of text."""
    texts = read_texts(QUICK_STRIDE if quick else 1)
    rows: list[Row] = []
    base: list[Tensor] = []
    for name, choices in FORMATS.items():
        runtime = load_runtime(choices)
        predictions = predict(runtime, texts)
        base = base or predictions
        rows += _rows(f"{name} ({runtime.layout.bytes_per_token:g} B a token)", choices["cache_format"], texts, predictions, base)
    return rows


def _rows(what: str, main_format: str, texts: list[Text], predictions: list[Tensor], base: list[Tensor]) -> list[Row]:
    nats = negative_log_likelihood(texts, predictions)
    change, goal = change_percent(nats, negative_log_likelihood(texts, base)), GOALS_PERCENT[main_format]
    by_kind = []
    for kind in sorted({text.kind for text in texts}):
        chosen = [number for number, text in enumerate(texts) if text.kind == kind]
        by_kind.append(f"{kind} {negative_log_likelihood([texts[i] for i in chosen], [predictions[i] for i in chosen]):.4f}")
    print(f"{what}: perplexity {change:+.3f} %, divergence {divergence(base, predictions):.2e}, {', '.join(by_kind)}", file=sys.stderr)
    return [
        Row(target="quality", what=what, value=change, unit="% perplexity", goal=f"within {goal:g}", met=abs(change) <= goal),
        Row(target="quality", what="  divergence from fp32", value=divergence(base, predictions), unit="nats a token", goal="-", met=True),
        Row(target="quality", what=f"  {', '.join(by_kind)}", value=nats, unit="nats a token", goal="-", met=True),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_benchmark("perplexity", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
