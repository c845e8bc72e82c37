"""Whatever a model says under a tool's grammar, what a client reads is a call whose arguments satisfy the tool's schema."""

import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_runtime.sampling.grammar import GrammarCompiler, GrammarVocabulary
from kv_transfer.errors import InvalidRequest
from kv_transfer.grammar import GrammarKind, GrammarSpec
from kv_transfer.messages import FinishReason
from router.gateway.answer import Answer
from router.gateway.grammar_check import check
from router.gateway.grammar_fields import AskedGrammar
from router.gateway.grammar_frames import CheckRequest
from router.gateway.tokenizer import TextTokenizer
from router.gateway.tool_grammar import find_tool_grammar
from router.gateway.tools import ToolUse, read_tools

TINY = Path(__file__).parent.parent.parent / "glm_runtime" / "tiny"
TOKENIZER = TextTokenizer(TINY)
COMPILER = GrammarCompiler(GrammarVocabulary.load(TINY, vocab_size=TOKENIZER.num_token_ids, end_ids=TOKENIZER.eos_token_ids))
MAX_STEPS = 400

NAMES = st.text("abz_é ", min_size=1, max_size=4).map(str.strip).filter(bool)
VALUES = st.one_of(
    st.just({"type": "boolean"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-50, 50), st.integers(0, 500)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(NAMES, st.integers(0, 99)), min_size=1, max_size=3)),
    st.builds(lambda values: {"type": "string", "enum": values}, st.lists(NAMES, min_size=1, max_size=3)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 3), st.integers(0, 4)),
    st.just({"type": "string", "pattern": "^[a-c]{2}[0-9/]$"}),
    st.just({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3}),
    st.just({"$ref": "#/$defs/colour"}),
    st.just({"allOf": [{"$ref": "#/$defs/colour"}], "default": "red"}),
    st.just({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}], "default": None}),
    st.just({"oneOf": [{"const": "x"}, {"const": 7}, {"type": "boolean"}]}),
    st.just({"type": ["string", "null"], "maxLength": 2}),
    st.just({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"type": "integer", "minimum": 7, "maximum": 8}]}),
    st.just(
        {"anyOf": [{"type": "string", "pattern": '^[ 0-9"\\[\\]-]{1,4}$'}, {"type": "array", "items": {"type": "null"}, "maxItems": 1}]}
    ),
    st.just({"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 2}),
    st.just({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/small"}]}),
    st.just({"type": "object", "properties": {"</arg_value>": {"type": "boolean"}}, "additionalProperties": False}),
)


def make_tool(name: str, properties: dict[str, Any], is_whole: bool) -> dict[str, Any]:
    schema = {
        "type": "object", "properties": properties, "required": list(properties) if is_whole else list(properties)[:1],
        "additionalProperties": False, "$defs": {
            "small": {"type": "integer", "minimum": 0, "maximum": 9},
            "colour": {"enum": ["red", "blue"], "type": "string"},
        },
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": schema}}


schemas = st.tuples(st.dictionaries(NAMES, VALUES, max_size=3), st.booleans())


def draw_turn(spec: GrammarSpec, seed: int) -> list[int]:
    """Tokens of a model that knows nothing: any of those that are allowed, an end as soon as one is."""
    state, chance, tokens = COMPILER.start(spec), random.Random(seed), []
    for _ in range(MAX_STEPS):
        bits = (state.masks()[0][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten().nonzero().flatten().tolist()
        ends = [token for token in allowed if token in TOKENIZER.eos_token_ids]
        tokens.append(chance.choice(ends or allowed))
        assert state.accept(tokens[-1:]), state.error
        if ends:
            return tokens
    raise AssertionError("the turn does not end")


def grammar_of(use: ToolUse) -> str:
    asked = find_tool_grammar(use, None)
    assert asked is not None
    reply = check(CheckRequest(asked.notation.value, asked.text, False, 10.0))
    assert reply.spec == GrammarSpec(GrammarKind.LARK, asked.text), reply.error
    return asked.text


@given(st.lists(schemas, min_size=1, max_size=3), st.integers(0, 2**32), st.booleans())
def test_a_forced_call_satisfies_its_schema(tools: list[tuple[dict[str, Any], bool]], seed: int, is_named: bool) -> None:
    offered = [make_tool(f"tool-{index}", *tool) for index, tool in enumerate(tools)]
    choice = {"type": "function", "function": {"name": "tool-0"}} if is_named else "required"
    use = read_tools(offered, choice, None)
    tokens = draw_turn(GrammarSpec(GrammarKind.LARK, grammar_of(use)), seed)
    answer = Answer(TOKENIZER, stops=(), end_ids=TOKENIZER.eos_token_ids, think_end_id=None, calls=use.call_format(), has_roles=True)
    delta = answer.feed(tokens, FinishReason.STOP)
    assert (delta.content, delta.finish_reason) == ("", "tool_calls")
    names = [call.name for call in delta.calls if call.name is not None]
    assert len(names) == 1
    arguments = json.loads("".join(call.arguments for call in delta.calls))
    assert not is_named or names == ["tool-0"]
    jsonschema.validate(arguments, offered[int(names[0][-1])]["function"]["parameters"])


@pytest.mark.parametrize(("is_parallel", "text"), [(None, "start: call+\n"), (False, "start: call\n")])
def test_one_call_or_several(is_parallel: bool | None, text: str) -> None:
    assert grammar_of(read_tools([make_tool("f", {}, True)], "required", is_parallel)).startswith(text)


def test_only_what_is_strict_is_held_to_its_schema_where_calls_are_free() -> None:
    tools = [make_tool("loose", {"a": {"type": "boolean"}}, True), make_tool("tight", {"a": {"type": "boolean"}}, True)]
    assert find_tool_grammar(read_tools(tools, "auto", None), None) is None
    tools[1]["function"]["strict"] = True
    text = grammar_of(read_tools(tools, "auto", None))
    loose, tight = (next(line for line in text.splitlines() if line.startswith(f"tool_{index}:")) for index in (0, 1))
    assert "/[^<]+/" in loose
    assert tight == 'tool_1: "tight" tool_1_0'


def test_what_must_be_there_is_there_and_what_is_folded_is_free() -> None:
    hidden = {"type": "function", "function": {"name": "f", "parameters": {"required": ["x"]}}}
    assert 'tool_0_0: <arg_key> "x" </arg_key>' in grammar_of(read_tools([hidden], "required", None))
    folded = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}}}
    assert "/[^<]+/" in grammar_of(read_tools([folded], "required", None))
    folded["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="strict") as caught:
        find_tool_grammar(read_tools([folded], "auto", None), None)
    assert caught.value.param == "tools.0.function.parameters"


def of_schema(schema: dict[str, Any], *, is_strict: bool = True) -> AskedGrammar:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": is_strict}}
    asked = find_tool_grammar(read_tools([tool], "required", None), None)
    assert asked is not None
    return asked


@pytest.mark.parametrize(
    ("pattern", "regex"),
    [(r"US\$", r"/(?s:.*)(?:US\$)(?s:.*)/"), (r"^a\\$", r"/(?:a\\)/"), ("^a$", "/(?:a)/"), ("$", "/(?s:.*)(?:)/"), ("^", "/(?:)(?s:.*)/")],
)
def test_a_pattern_keeps_an_escaped_dollar(pattern: str, regex: str) -> None:
    asked = of_schema({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert asked.text.endswith(f"tool_0_0_value: {regex}")
    assert not check(CheckRequest(asked.notation.value, asked.text, False, 10.0)).error


def test_only_definitions_that_are_meant_are_written() -> None:
    """An ordinary strict tool: forty numbers, and forty definitions of which one is used, through another."""
    definitions = {f"d{index}": {"type": "object", "properties": {"text": {"description": "x" * 200}}} for index in range(40)}
    definitions["a"] = {"type": "array", "items": {"$ref": "#/$defs/d7"}}
    numbers = {f"p{index}": {"type": "integer"} for index in range(40)}
    text = of_schema({"properties": {**numbers, "list": {"$ref": "#/$defs/a"}}, "$defs": definitions}).text
    (line,) = [line for line in text.split("\n") if "$defs" in line]
    assert set(json.loads(line.partition("%json ")[2])["$defs"]) == {"a", "d7"}


def test_a_grammar_that_grows_too_long_is_not_made_whole() -> None:
    big = {"type": "array", "items": {"enum": ["x" * 100_000]}}
    schema = {"properties": {f"p{index}": {"$ref": "#/$defs/big"} for index in range(4000)}, "$defs": {"big": big}}
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="longer than"):
        of_schema(schema)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_many_names_take_a_short_time() -> None:
    names = [f"n{index}" for index in range(15_000)]
    start = time.perf_counter()
    with pytest.raises(InvalidRequest, match="longer than"):
        of_schema({"properties": {}, "required": names})
    assert time.perf_counter() - start < 0.3


def test_endless_unions_are_refused_or_named() -> None:
    endless = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 400}}}
    with pytest.raises(InvalidRequest):
        of_schema(endless, is_strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2001},
        {"type": "string", "maxLength": 2001},
        {"type": "string", "not": {"const": "a"}},
        {"type": "string", "anyOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"allOf": [{"type": "string"}, {"pattern": "a"}]},
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_what_text_is_not_held_to_is_named_and_never_strict(schema: dict[str, Any]) -> None:
    (note,) = of_schema({"properties": {"a": schema}}, is_strict=False).notes
    assert note.startswith("tools.0.function.parameters: ")
    with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
        of_schema({"properties": {"a": schema}})
    assert caught.value.param == "tools.0.function.parameters"
