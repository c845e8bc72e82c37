"""Turns of GLM's format, from tokens to what a client is told."""

import itertools
import json
from typing import Any

import pytest

from kv_transfer.messages import FinishReason
from router.gateway.answer import Answer, CallFormat, TextDelta
from router.gateway.tokenizer import TextTokenizer
from router.gateway.tool_values import ArgumentTypes, find_types, to_json
from router.gateway.turn_parser import OPEN_CALL_STATES, STRICT_STATES, TRANSITIONS, CallDelta, State, Tag

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
WEATHER = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
    },
    "$defs": {"Point": {"type": "object"}},
}
TOOLS = {"get_weather": ArgumentTypes(WEATHER), "now": ArgumentTypes(None)}
CITY = "<arg_key>city</arg_key><arg_value>Zürich</arg_value>"


def make(tokenizer: TextTokenizer, *stops: str, thinks: bool = True, max_calls: int = 0, has_calls: bool = True) -> Answer:
    number = itertools.count()
    return Answer(
        tokenizer,
        stops=stops,
        end_ids=frozenset(tokenizer.eos_token_ids),
        think_end_id=tokenizer.control_id("</think>") if thinks else None,
        calls=CallFormat(TOOLS, max_calls) if has_calls else None,
        has_roles=True,
        make_call_id=lambda: f"call_{next(number)}",
    )


def calls_of(delta: TextDelta) -> list[tuple[str | None, str]]:
    """Name and arguments of each call."""
    found: list[tuple[str | None, str]] = []
    for call in delta.calls:
        if call.name is not None:
            found.append((call.name, call.arguments))
        else:
            found[call.index] = (found[call.index][0], found[call.index][1] + call.arguments)
    return found


def read(tokenizer: TextTokenizer, text: str, finish: FinishReason = STOP, **options: Any) -> tuple[str, str, list[Any], str | None]:
    delta = make(tokenizer, **options).feed(tokenizer.encode_raw(text), finish)
    return delta.reasoning, delta.content, calls_of(delta), delta.finish_reason


def test_a_turn_with_everything(tokenizer: TextTokenizer) -> None:
    text = f"I look.</think>Here: <tool_call>get_weather{CITY}<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
    arguments = '{"city": "Zürich", "days": 3}'
    assert read(tokenizer, text) == ("I look.", "Here: ", [("get_weather", arguments)], "tool_calls")


def test_the_name_comes_first_and_then_the_arguments_piece_by_piece(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    tokens = tokenizer.encode_raw(f"a</think><tool_call>get_weather{CITY}</tool_call>")
    calls = [call for token in tokens for call in answer.feed([token], None).calls]
    assert calls[0] == CallDelta(0, "call_0", "get_weather", "")
    assert all(call.call_id is None and call.name is None and call.index == 0 for call in calls[1:])
    assert calls[1].arguments == '{"city": "'
    assert len(calls) > 4, "a string is told as it comes"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Zürich"}


def test_several_calls_have_indices_and_ids(tokenizer: TextTokenizer) -> None:
    delta = make(tokenizer).feed(
        tokenizer.encode_raw("x</think>\n<tool_call>now</tool_call>\n\n<tool_call>now</tool_call>\n<|observation|>"), STOP
    )
    assert [(call.index, call.call_id, call.arguments) for call in delta.calls] == [
        (0, "call_0", ""), (0, None, "{}"), (1, "call_1", ""), (1, None, "{}"),
    ]  # fmt: skip
    assert delta.content == "", "blanks around calls say nothing"


def test_a_call_inside_thinking_ends_it(tokenizer: TextTokenizer) -> None:
    assert read(tokenizer, "I must<tool_call>now</tool_call><|observation|>") == ("I must", "", [("now", "{}")], "tool_calls")


def test_thinking_that_is_cut_off_is_all_there_is(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    delta = answer.feed(tokenizer.encode_raw("I must think"), LENGTH)
    assert (delta.reasoning, delta.content, answer.has_content, answer.finish_reason) == ("I must think", "", False, "length")


def test_blanks_are_content_where_no_call_comes(tokenizer: TextTokenizer) -> None:
    assert read(tokenizer, "x</think>\n\n<|user|>") == ("x", "\n\n", [], "stop")
    assert read(tokenizer, "x</think>\n\nyes<|user|>") == ("x", "\n\nyes", [], "stop")


def test_text_after_a_call_is_content(tokenizer: TextTokenizer) -> None:
    _, content, calls, reason = read(tokenizer, "x</think><tool_call>now</tool_call>\nDone.<|user|>")
    assert (content, calls, reason) == ("\nDone.", [("now", "{}")], "tool_calls")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("<tool_call> <arg_key>k", "<tool_call> <arg_key>k", []),
        ("<tool_call>no<tool_call>now</tool_call>", "<tool_call>no", [("now", "{}")]),
        ("<tool_call>now</think>a", "<tool_call>now</think>a", []),
        ("<tool_call>now<arg_key>k</tool_call>", "<arg_key>k</tool_call>", [("now", "{}")]),
        ("<tool_call>now<arg_key>k</arg_key>v</tool_call>", "<arg_key>k</arg_key>v</tool_call>", [("now", "{}")]),
        (f"<tool_call>get_weather{CITY}{CITY}</tool_call>", f"{CITY}</tool_call>", [("get_weather", '{"city": "Zürich"}')]),
        (f"<tool_call>get_weather{CITY}, and</tool_call>", ", and</tool_call>", [("get_weather", '{"city": "Zürich"}')]),
        ("</tool_call></arg_value>", "</tool_call></arg_value>", []),
    ],
)
def test_what_is_malformed_becomes_content(tokenizer: TextTokenizer, text: str, content: str, calls: list[Any]) -> None:
    reason = "tool_calls" if calls else "stop"
    assert read(tokenizer, f"x</think>{text}<|user|>") == ("x", content, calls, reason)


def test_blanks_between_tags_and_around_a_name_are_nothing(tokenizer: TextTokenizer) -> None:
    text = "x</think><tool_call>\nget_weather\n<arg_key> city </arg_key>\n<arg_value> Bern\n</arg_value>\n</tool_call>"
    assert read(tokenizer, text)[1:3] == ("", [("get_weather", '{"city": " Bern\\n"}')])


def test_a_call_that_is_cut_off_does_not_look_whole(tokenizer: TextTokenizer) -> None:
    for text, arguments in (("Zür", '{"city": "Zür'), ("", '{"city": "')):
        cut = f"x</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>{text}"
        assert read(tokenizer, cut, LENGTH)[2:] == ([("get_weather", arguments)], "length")
    assert read(tokenizer, "x</think><tool_call>get_weather<arg_key>days</arg_key><arg_value>12", LENGTH)[2] == [
        ("get_weather", '{"days": 12')
    ]
    assert read(tokenizer, "x</think><tool_call>get_wea", LENGTH)[1:] == ("<tool_call>get_wea", [], "length")


def test_a_call_that_the_model_ends_with_its_turn_is_closed(tokenizer: TextTokenizer) -> None:
    text = "x</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern"
    for end in ("<|observation|>", "</tool_call>", "<|assistant|>"):
        assert read(tokenizer, text + end)[2:] == ([("get_weather", '{"city": "Bern"}')], "tool_calls")


def test_a_role_ends_the_turn(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    delta = answer.feed(tokenizer.encode_raw("a</think>b<|assistant|><think>c</think>d"), None)
    assert (delta.reasoning, delta.content, delta.finish_reason) == ("a", "b", "stop")
    assert answer.num_tokens == len(delta.tokens) == 4


def test_tags_without_tools_are_text(tokenizer: TextTokenizer) -> None:
    text = "a</think>b<tool_call>now</tool_call>"
    assert read(tokenizer, f"{text}<|user|>", has_calls=False) == ("a", "b<tool_call>now</tool_call>", [], "stop")


def test_tags_that_are_spelt_out_or_stand_inside_a_value_are_text(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer)
    ids = tokenizer.control_ids
    (spelt,) = tokenizer.encode_runs(["<tool_call>now</tool_call></arg_value>"])
    head = tokenizer.encode_raw("x</think>")
    tail = [
        *tokenizer.encode_raw("<tool_call>now<arg_key>k</arg_key><arg_value>"),
        *spelt,
        ids["<think>"],
        ids["</think>"],
        ids["<tool_call>"],
    ]
    delta = answer.feed([*head, *spelt, *tail, *tokenizer.encode_raw("</arg_value></tool_call>")], None)
    assert delta.content == "<tool_call>now</tool_call></arg_value>"
    assert calls_of(delta) == [("now", json.dumps({"k": "<tool_call>now</tool_call></arg_value><think></think><tool_call>"}))]


def test_characters_do_not_reach_across_tags(tokenizer: TextTokenizer) -> None:
    euro = [tokenizer.token_bytes.index(bytes([byte])) for byte in "€".encode()]
    assert make(tokenizer, thinks=False).feed(euro, LENGTH).content == "€"
    call = tokenizer.encode_raw("<tool_call>now<arg_key>k</arg_key><arg_value>")
    end = tokenizer.encode_raw("</arg_value></tool_call>")
    delta = make(tokenizer, thinks=False).feed([euro[0], *call, euro[0], *end, *euro[1:]], LENGTH)
    assert delta.content == "\ufffd\ufffd\ufffd"
    assert calls_of(delta) == [("now", '{"k": "\ufffd"}')]


def test_one_call_is_enough_where_calls_are_not_parallel(tokenizer: TextTokenizer) -> None:
    answer = make(tokenizer, max_calls=1)
    tokens = tokenizer.encode_raw("x</think><tool_call>now</tool_call><tool_call>now</tool_call>")
    delta = answer.feed(tokens, None)
    assert (calls_of(delta), delta.finish_reason, answer.num_tokens) == ([("now", "{}")], "tool_calls", len(tokens) - 3)


def test_stop_strings_do_not_reach_into_calls(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode_raw(f"x</think>Zü<tool_call>get_weather{CITY}</tool_call>rich and Zürich")
    delta = make(tokenizer, "Zürich").feed(tokens, None)
    assert (delta.content, calls_of(delta), delta.finish_reason) == ("Zürich and ", [("get_weather", '{"city": "Zürich"}')], "stop")


# -- the table -----------------------------------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(State)
    reached, todo = {State.REASONING}, [State.REASONING]
    while todo:
        todo += [state for state in TRANSITIONS[todo.pop()].values() if state not in reached and not reached.add(state)]  # type: ignore[func-returns-value]
    assert reached == set(State) - {State.CONTENT}, "content begins with text, not with a tag"
    assert {tag for row in TRANSITIONS.values() for tag in row} == set(Tag)
    assert all(row.get(Tag.ROLE) is State.ENDED for state, row in TRANSITIONS.items() if state is not State.ENDED)
    assert not TRANSITIONS[State.ENDED]
    assert {State.NAME, State.CALL, State.KEY, State.GAP, State.VALUE} == STRICT_STATES | OPEN_CALL_STATES


# -- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("12", {"integer"}, "12"), (" 12\n", {"integer"}, "12"), ("12", {"number"}, "12"), ("1e5", {"number"}, "1e5"),
        ("True", {"boolean"}, "true"), ("None", {"null", "integer"}, "null"), ('"7"', {"integer"}, "7"), ("NaN", {"number"}, '"NaN"'),
        ("many", {"integer"}, '"many"'), ("[1, {}]", {"array"}, "[1, {}]"), ("[1", {"array"}, '"[1"'), ("{}", {"array"}, "{}"),
        ("null", {"string", "null"}, "null"), ("5", {"string", "null"}, '"5"'), ('"a"', {"string", "null"}, '"\\"a\\""'),
        ("5", {"string", "integer"}, "5"), ("a b", {"string", "integer"}, '"a b"'), ("", {"object"}, '""'),
        ("[" * 9000, {"array"}, json.dumps("[" * 9000)),
    ],
)  # fmt: skip
def test_values_are_read_by_their_types(text: str, types: set[str], expected: str) -> None:
    assert to_json(text, frozenset(types)) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}), ({"type": ["string", "null"]}, {"string", "null"}), ({}, set()), (True, set()),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}), ({"const": 2.5}, {"number"}), ({"$ref": "#/$defs/a"}, {"array"}),
        ({"$ref": "#/$defs/loop"}, set()), ({"$ref": "https://example.org"}, set()),
        ({"anyOf": [{"type": "null"}, {"type": "object"}]}, {"null", "object"}),
        ({"oneOf": [{"type": "null"}, {}]}, set()), ({"allOf": [{"title": "x"}, {"type": "number"}]}, {"number"}),
    ],
)  # fmt: skip
def test_types_are_found_in_a_schema(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"a": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert find_types(schema, root) == types


def test_a_schema_that_unfolds_without_end_says_nothing() -> None:
    twice = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    assert find_types(twice, {"$defs": {"a": twice}}) == frozenset()


def test_an_argument_without_a_schema_is_a_string(tokenizer: TextTokenizer) -> None:
    assert read(tokenizer, "x</think><tool_call>now<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>")[2] == [("now", '{"n": "5"}')]
