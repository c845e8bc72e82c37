"""Whatever a model says under a tool's grammar, what a client reads is a call whose arguments satisfy the tool's schema."""

import json
import random
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
    st.just({"type": "array", "items": {"$ref": "#/$defs/small"}, "maxItems": 2}),
    st.just({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/small"}]}),
    st.just({"type": "object", "properties": {"</arg_value>": {"type": "boolean"}}, "additionalProperties": False}),
)


def make_tool(name: str, properties: dict[str, Any], is_whole: bool) -> dict[str, Any]:
    schema = {
        "type": "object", "properties": properties, "required": list(properties) if is_whole else list(properties)[:1],
        "additionalProperties": False, "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
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
    with pytest.raises(InvalidRequest, match="strict"):
        find_tool_grammar(read_tools([folded], "auto", None), None)
