"""Many fields, one constraint."""

import json
from typing import Any

import pytest

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway.grammar_fields import ANY_OBJECT, AskedGrammar, GrammarFields, Notation, find_grammar

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def find(**fields: Any) -> AskedGrammar | None:
    return find_grammar(GrammarFields.model_validate_json(json.dumps(fields)))


@pytest.mark.parametrize(
    ("fields", "param", "notation", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", Notation.JSON_SCHEMA, json.dumps(ANY_OBJECT)),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", Notation.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", Notation.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", Notation.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["é", '"']}}, "structured_outputs.choice", Notation.GRAMMAR, 'start: "é" | "\\""'),
        ({"structured_outputs": {"grammar": "start: X"}}, "structured_outputs.grammar", Notation.GRAMMAR, "start: X"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", Notation.JSON_SCHEMA, json.dumps(ANY_OBJECT)),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, "structured_outputs.regex", Notation.REGEX, "a"),
        ({"guided_json": SCHEMA}, "guided_json", Notation.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"guided_json": True}, "guided_json", Notation.JSON_SCHEMA, "true"),
        ({"guided_regex": "a"}, "guided_regex", Notation.REGEX, "a"),
        ({"guided_choice": ["a"]}, "guided_choice", Notation.GRAMMAR, 'start: "a"'),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", Notation.GRAMMAR, "root ::= x"),
        ({"regex": "a"}, "regex", Notation.REGEX, "a"),
        ({"ebnf": "root ::= x"}, "ebnf", Notation.GRAMMAR, "root ::= x"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", Notation.JSON_SCHEMA, json.dumps(SCHEMA)),
    ],
)
def test_every_spelling(fields: dict[str, Any], param: str, notation: Notation, text: str) -> None:
    assert find(**fields) == AskedGrammar(param, notation, text)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "regex": None}])
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert find(**fields) is None


@pytest.mark.parametrize(("strict", "is_lenient"), [(True, False), (False, True), (None, True)])
def test_only_strict_refuses_what_cannot_be_enforced(strict: bool | None, is_lenient: bool) -> None:
    asked = find(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": strict}})
    assert asked == AskedGrammar("response_format.json_schema.schema", Notation.JSON_SCHEMA, json.dumps(SCHEMA), is_lenient)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"json_schema": "[" * 60000}, "json_schema"),
        ({"guided_choice": ["x" * 1000 for _ in range(100)]}, "guided_choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find(**fields)
    assert caught.value.param == param


def test_an_option_that_would_change_the_answer_is_unsupported() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        find(structured_outputs={"regex": "a", "whitespace_pattern": " "})
    assert caught.value.param == "structured_outputs.whitespace_pattern"
