"""Whatever the schema, the model's output is JSON that validates against it, drafts or none, cut into whatever chunks.

The shipped model knows next to nothing of JSON, so it is the constraint that makes the output valid.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jsonschema
import pytest
import torch

from glm_runtime.engine.offline import generate
from glm_runtime.runtime import GlmRuntime
from glm_runtime.runtime_config import RuntimeConfig
from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.messages import SamplingParameters
from router.gateway.tokenizer import TextTokenizer
from tests.prompts import make_prompt

TINY = Path(__file__).parents[2] / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
MAX_TOKENS = 400
"""More than any schema below allows, blanks included, so that every output ends by itself."""


@pytest.fixture(scope="module")
def runtime() -> Iterator[GlmRuntime]:
    """One thread: steps of one row gain nothing from a second, and lose much where the cores are busy."""
    num_threads = torch.get_num_threads()
    yield GlmRuntime.load(RuntimeConfig(checkpoint=TINY, cache_bytes=64 << 20, num_threads=1))
    torch.set_num_threads(num_threads)


NAMES = st.text("abz_ é", min_size=1, max_size=4)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-50, 50), st.integers(0, 500)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(NAMES, st.integers(0, 99), st.booleans()), min_size=1, max_size=3)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 3), st.integers(0, 4)),
    st.just({"type": "string", "pattern": "^[a-c]{2}[0-9]$"}),
)


def _object(properties: dict[str, Any], is_whole: bool) -> dict[str, Any]:
    required = list(properties) if is_whole else list(properties)[:1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.booleans()),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, _branches, max_leaves=5)


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_output_validates_and_does_not_depend_on_drafts(runtime: GlmRuntime, schema: dict[str, Any], seed: int) -> None:
    prompts = [make_prompt(20, seed % 50 + number) for number in range(2)]
    sampling = [_sampling(schema, seed, temperature) for temperature in (0.0, 1.5)]
    outputs = generate(runtime, prompts, sampling)
    for output in outputs:
        assert output[-1] in TOKENIZER.eos_token_ids, "the output ends by itself"
        text = b"".join(TOKENIZER.token_bytes[token] for token in output[:-1]).decode()
        jsonschema.validate(json.loads(text), schema)
    for prompt, given, output in zip(prompts, sampling, outputs, strict=True):
        assert generate(runtime, [prompt], given, max_drafts=0, chunk_tokens=7) == [output], "neither drafts nor company change it"


def _sampling(schema: dict[str, Any], seed: int, temperature: float) -> SamplingParameters:
    return SamplingParameters(
        max_tokens=MAX_TOKENS,
        seed=seed,
        temperature=temperature,
        stop_token_ids=TOKENIZER.eos_token_ids,
        grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    )
