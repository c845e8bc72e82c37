"""Asks every setting the same held-out questions, one request at a time and in turns, and checks that all answer the same."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from tokenizers import Tokenizer

from benchmarks.speculation.served_pair import ServedPair, TimedAnswer
from cluster.config import SHIPPED_CHECKPOINT
from glm_runtime.checkpoint import check_checkpoint
from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.messages import SamplingParameters, WorkerLoad

MAX_TOKENS = 160
NUM_THREADS = 1
CACHE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How many drafts a pair makes."""

    name: str
    max_drafts: int
    adapts_drafts: bool

    @property
    def runtime(self) -> RuntimeConfig:
        """Of both workers; all else is the default, but for the size of the cache."""
        return RuntimeConfig(
            checkpoint=SHIPPED_CHECKPOINT,
            cache_bytes=CACHE_BYTES,
            num_threads=NUM_THREADS,
            max_drafts=self.max_drafts,
            adapts_drafts=self.adapts_drafts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What one setting has reached over all prompts, each by its median. drafted, accepted: by position; num_steps: of all repeats."""

    num_tokens: int
    num_first_tokens: int
    first_s: float
    rest_s: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_per_step: float

    @property
    def rest_tokens_per_s(self) -> float:
        """After each answer's first token."""
        return (self.num_tokens - self.num_first_tokens) / self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """From asking to the end: with prefill and hand-off."""
        return self.num_tokens / (self.first_s + self.rest_s)


def chat_prompts(count: int) -> list[list[int]]:
    """The first `count` held-out chat prompts, as token ids."""
    tokenizer = Tokenizer.from_file(str(SHIPPED_CHECKPOINT / "tokenizer.json"))
    records = map(json.loads, (SHIPPED_CHECKPOINT / "heldout.jsonl").read_text(encoding="utf-8").splitlines())
    texts = [record["prompt"] for record in records if record["kind"] == "chat"][:count]
    assert len(texts) == count, f"{len(texts)} chat prompts are held out"
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def greedy() -> SamplingParameters:
    """The best token, up to one of the model's end tokens."""
    end_ids = check_checkpoint(SHIPPED_CHECKPOINT).eos_token_ids
    return SamplingParameters(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, stop_token_ids=end_ids)


async def compare(settings: Sequence[Setting], *, num_prompts: int, repeats: int) -> dict[str, Speed]:
    """Every setting's speed, by name. Raises AssertionError when one answers anything else than one process without drafts."""
    prompts, sampling = chat_prompts(num_prompts), greedy()
    expected = generate(GlmRuntime.load(settings[0].runtime), prompts, sampling, max_drafts=0)
    async with AsyncExitStack() as stack:
        pairs = {setting.name: await stack.enter_async_context(ServedPair(setting.name, setting.runtime)) for setting in settings}
        for name, pair in pairs.items():
            for number, prompt in enumerate(prompts):
                answer = await pair.ask(prompt, sampling, f"check {number}".encode())
                assert list(answer.tokens) == expected[number], f"{name} answers prompt {number} otherwise than one process without drafts"
        before = {name: await pair.load() for name, pair in pairs.items()}
        answers = await _ask_in_turns(pairs, prompts, sampling, repeats)
        after = {name: await pair.load() for name, pair in pairs.items()}
    return {name: _speed(answers[name], before[name], after[name]) for name in pairs}


async def _ask_in_turns(
    pairs: Mapping[str, ServedPair], prompts: Sequence[Sequence[int]], sampling: SamplingParameters, repeats: int
) -> dict[str, list[list[TimedAnswer]]]:
    """By setting and prompt, one answer a repeat. Who comes first changes from repeat to repeat."""
    answers: dict[str, list[list[TimedAnswer]]] = {name: [[] for _ in prompts] for name in pairs}
    names = list(pairs)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for number, prompt in enumerate(prompts):
            for name in names[turn:] + names[:turn]:
                answers[name][number].append(await pairs[name].ask(prompt, sampling, f"{repeat} {number}".encode()))
    return answers


def _speed(answers: Sequence[Sequence[TimedAnswer]], before: WorkerLoad, after: WorkerLoad) -> Speed:
    drafted = tuple(new - old for new, old in zip(after.drafted, before.drafted, strict=True))
    accepted = tuple(new - old for new, old in zip(after.accepted, before.accepted, strict=True))
    num_drawn = sum(len(answer.tokens) - 1 for of_prompt in answers for answer in of_prompt)
    return Speed(
        num_tokens=sum(len(of_prompt[0].tokens) for of_prompt in answers),
        num_first_tokens=len(answers),
        first_s=sum(median(answer.first_s for answer in of_prompt) for of_prompt in answers),
        rest_s=sum(median(answer.rest_s for answer in of_prompt) for of_prompt in answers),
        drafted=drafted,
        accepted=accepted,
        tokens_per_step=num_drawn / (after.num_steps - before.num_steps),
    )
