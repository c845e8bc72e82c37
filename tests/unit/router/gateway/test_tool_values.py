"""An argument's text as JSON."""

import json

import pytest

from router.gateway.tool_values import STRING, to_json


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
