"""An argument's text as JSON, and its types."""

import copy
import json
import time
from typing import Any

import pytest

from kv_transfer.errors import InvalidRequest
from router.gateway.tool_values import STRING, find_types, to_json
from router.gateway.tools import read_tools


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (r'["\ud800", "\ud83d\ude00", "\\ud800", "\uDC00\ud800x"]', "array", ["\ufffd", "\U0001f600", r"\ud800", "\ufffd\ufffdx"]),
        (r'{"a": "\ud800", "a": 1}', "object", {"a": 1}),
        (r'"{\"a\": \"\ud800\"}"', "object", {"a": "\ufffd"}),
        (r'"\ud800"', "array", "\ufffd"),
    ],
)
def test_half_a_surrogate_pair_never_leaves(text: str, kind: str, expected: object) -> None:
    told = to_json(text, frozenset({kind}))
    assert "\\ud800" not in told.replace(r"\\ud800", "")
    told.encode()
    assert json.loads(told) == expected


def test_a_string_keeps_what_it_spells() -> None:
    assert json.loads(to_json(r"\ud800", STRING)) == r"\ud800"


def read(*schemas: dict[str, Any]) -> None:
    named = enumerate(schemas)
    read_tools(
        [{"type": "function", "function": {"name": f"f{index}", "parameters": schema}} for index, schema in named], None, None
    ).call_format()


def test_types_of_a_small_schema_take_a_short_time() -> None:
    """Each union is looked at once, however often it is meant, even by itself: 14 KB took seconds before."""
    wide = {"anyOf": [{"$ref": "#/$defs/a"}] * 400}
    schema = {"properties": {f"p{index}": {"$ref": "#/$defs/a"} for index in range(100)}, "$defs": {"a": wide}}
    start = time.perf_counter()
    read(schema)
    assert time.perf_counter() - start < 0.1


def test_too_many_schemas_in_one_request_are_refused() -> None:
    part = {"properties": {f"p{index}": {"enum": [1] * 100} for index in range(400)}}
    read(part)
    with pytest.raises(InvalidRequest) as caught:
        read(part, copy.deepcopy(part))
    assert caught.value.param == "tools.1.function.parameters"


def test_types_of_shared_and_endless_schemas() -> None:
    root: dict[str, Any] = {
        "$defs": {"a": {"enum": ["x", 1]}, "b": {"$ref": "#/$defs/b"}, "c": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}
    }
    union = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "null"}]}
    assert find_types(union, root) == {"string", "integer", "null"}
    assert find_types({"$ref": "#/$defs/b"}, root) == find_types({"$ref": "#/$defs/c"}, root) == frozenset()
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)}
    assert find_types({"$ref": "#/$defs/d0"}, {"$defs": chain}) == frozenset()
