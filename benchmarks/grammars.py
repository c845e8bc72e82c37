"""What constrained output costs: compiling a constraint, checking it, and filling a row's mask, at GLM-5.3's vocabulary size.

The vocabulary is a byte-level BPE trained here on the installed Python packages and padded to 154,880 ids, since the real tokenizer does
not ship with the project; --quick takes the small model's. Each figure is the minimum of the repeats, token by token: what is measured is
the work, not the machine's other work.
"""

import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.report import Row, run_benchmark
from cluster.config import SHIPPED_CHECKPOINT
from glm_runtime.sampling.grammar import GrammarCompiler, GrammarVocabulary
from kv_transfer.grammar import GrammarKind, GrammarSpec

VOCAB_SIZE = 154_880
NUM_LEARNT = 151_000
CORPUS_CHARACTERS = 60_000_000
NUM_DRAFTS = 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
ENUMS = {
    "type": "object",
    "properties": {f"field_{i}": {"enum": [f"value_{i}_{j}" for j in range(20)]} for i in range(50)},
    "required": [f"field_{i}" for i in range(50)],
    "additionalProperties": False,
}
NAMES = r"[A-Z][a-z]{2,20}( [A-Z][a-z]{2,20}){1,3}, [0-9]{4}-[0-9]{2}-[0-9]{2}"
CASES: tuple[tuple[str, GrammarKind, Any, str], ...] = (
    (
        "person",
        GrammarKind.JSON_SCHEMA,
        PERSON,
        '{"name": "Ada Lovelace of London", "age": 36, "email": "ada@example.org and more", "tags": ["red", "blue"]}',
    ),
    ("any object", GrammarKind.JSON_SCHEMA, {"type": "object"}, '{"title": "To do", "items": [{"id": 1, "done": false}], "n": 12.5e3}'),
    ("50 x 20 enums", GrammarKind.JSON_SCHEMA, ENUMS, json.dumps({f"field_{i}": f"value_{i}_{i % 20}" for i in range(50)})),
    ("regex", GrammarKind.REGEX, NAMES, "Ada Lovelace Byron, 1815-12-10"),
)


def measure(quick: bool) -> Sequence[Row]:
    """All cases."""
    if quick:
        tokenizer, end_id, vocab_size, repeats = Tokenizer.from_file(str(SHIPPED_CHECKPOINT / "tokenizer.json")), 2524, 2560, 2
    else:
        tokenizer, end_id, vocab_size, repeats = *train_tokenizer(), VOCAB_SIZE, 9
    vocabulary = GrammarVocabulary(tokenizer.to_str(), vocab_size=vocab_size, end_ids=[end_id])
    rows = []
    for name, kind, written, document in CASES:
        spec = GrammarSpec(kind, written if isinstance(written, str) else json.dumps(written))
        tokens = tokenizer.encode(document, add_special_tokens=False).ids
        rows += list(_measure_case(name, spec, tokens, vocabulary, repeats))
    return rows


def train_tokenizer() -> tuple[Any, int]:
    """A byte-level BPE of about GLM-5.3's size, and the id of its end token. Takes 20 seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_LEARNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
        max_token_length=40,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(["<end>"])
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    return tokenizer, end


def _corpus() -> Iterator[str]:
    num_characters = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:40_000]
        num_characters += len(text)
        if num_characters > CORPUS_CHARACTERS:
            return
        yield text


def _measure_case(name: str, spec: GrammarSpec, tokens: list[int], vocabulary: GrammarVocabulary, repeats: int) -> Iterator[Row]:
    compiler = GrammarCompiler(vocabulary)
    compile_s = min(_timed(lambda: compiler.compile(spec)) for _ in range(repeats))
    yield _row(f"{name}: compile", compile_s * 1e3, "ms", 10.0, repeats)
    single = [_walk(GrammarCompiler(vocabulary), spec, tokens, 0) for _ in range(repeats)]
    drafted = [_walk(GrammarCompiler(vocabulary), spec, tokens, NUM_DRAFTS) for _ in range(repeats)]
    mask_s = [min(times) for times in zip(*single, strict=True)]
    verify_s = [min(times) for times in zip(*drafted, strict=True)]
    yield _row(f"{name}: mask, mean over {len(tokens)} tokens", sum(mask_s) / len(mask_s) * 1e6, "us", 500.0, repeats)
    yield _row(f"{name}: slowest mask", max(mask_s) * 1e6, "us", 5000.0, repeats)
    yield _row(f"{name}: masks of {1 + NUM_DRAFTS} rows, mean", sum(verify_s) / len(verify_s) * 1e6, "us", 2000.0, repeats)


def _walk(compiler: GrammarCompiler, spec: GrammarSpec, tokens: list[int], num_drafts: int) -> list[float]:
    """Seconds for the masks at each token, following the tokens."""
    state = compiler.start(spec)
    seconds = []
    for index, token in enumerate(tokens):
        drafts = tokens[index : index + num_drafts]
        seconds.append(_timed(lambda drafts=drafts: state.masks(drafts)))  # type: ignore[misc]
        assert state.accept([token]), f"token {token} at {index} is refused: {state.error}"
    return seconds


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _row(what: str, value: float, unit: str, limit: float, repeats: int) -> Row:
    return Row(target="-", what=what, value=value, unit=unit, goal=f"<= {limit:g}", met=value <= limit, repeats=repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    return run_benchmark("grammars", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
