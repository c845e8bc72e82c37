"""What a forced tool call must look like, as a grammar in llguidance's dialect of Lark, with GLM's tags as special tokens.

Knows: how the format and the tools' schemas become rules. Does not know whether they are good ones (`grammar_checker.py` asks), or where
in an output the grammar begins (`GrammarSpec`).

    start: call+            call: <tool_call> (tool_0 | tool_1) </tool_call>
    tool_0: "name" <arg_key> "city" </arg_key> <arg_value> value_0 </arg_value> ...
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kv_transfer.errors import InvalidRequest
from kv_transfer.grammar import MAX_GRAMMAR_BYTES, inside_slashes, with_options
from router.gateway.grammar_fields import AskedGrammar, Notation
from router.gateway.tool_values import STRING, find_types
from router.gateway.tools import Tool, ToolChoice, ToolUse

ANY_TEXT = "/(?s:.*)/"
MAX_REPETITION = 2000
"""Longest repetition written out: the limits of one grammar would refuse more."""
FOLDING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")
FREE_ARGUMENT = r"<arg_key> /[^<]+/ </arg_key> <arg_value> /(?s:.*)/ </arg_value>"


def find_tool_grammar(use: ToolUse, answer: AskedGrammar | None) -> AskedGrammar | None:
    """The grammar that a request's tools ask for. answer: what the text must look like instead, where calls are optional.

    Raises InvalidRequest where both cannot hold.
    """
    if use.choice is ToolChoice.NONE:
        return answer
    if use.choice is ToolChoice.REQUIRED:
        if answer is not None:
            raise InvalidRequest(f"tool_choice asks for a call and {answer.param} for a text; give one of them", param=answer.param)
        return _checked("tool_choice", write_grammar(use, checks_all=True))
    if answer is not None:
        return _with_answer(use, answer)
    if any(tool.is_strict for tool in use.tools):
        return _checked("tools", write_grammar(use, checks_all=False))
    return None


def _with_answer(use: ToolUse, answer: AskedGrammar) -> AskedGrammar:
    if answer.notation is not Notation.JSON_SCHEMA:
        raise InvalidRequest(f"{answer.param} cannot be combined with tools; only a JSON schema can", param=answer.param)
    rule = f"answer: {_json_rule(json.loads(answer.text), is_lenient=answer.is_lenient)}"
    return _checked(answer.param, f"{write_grammar(use, checks_all=False, otherwise=' | answer')}\n{rule}")


def _checked(param: str, text: str) -> AskedGrammar:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar of these tools is longer than {MAX_GRAMMAR_BYTES} bytes; use fewer or smaller ones", param=param)
    return AskedGrammar(param, Notation.CALLS, text)


def write_grammar(use: ToolUse, *, checks_all: bool, otherwise: str = "") -> str:
    """The rules. checks_all: hold every tool to its schema, as far as it can be; else only those that say `strict`.

    otherwise: what may stand instead of the calls.
    """
    tools = use.callable_tools
    rules = [f"start: call{'+' if use.is_parallel else ''}{otherwise}"]
    rules.append("call: <tool_call> (" + " | ".join(f"tool_{index}" for index in range(len(tools))) + ") </tool_call>")
    for index, tool in enumerate(tools):
        rules += _tool_rules(f"tool_{index}", tool, is_free=not (checks_all or tool.is_strict))
    return "\n".join(rules)


def _tool_rules(rule: str, tool: Tool, *, is_free: bool) -> Iterator[str]:
    schema = tool.parameters or {}
    if is_free or _is_folded(tool, schema):
        yield f"{rule}: {_literal(tool.name)} ({FREE_ARGUMENT})*"
        return
    given, required = schema.get("properties"), schema.get("required")
    properties: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for name in needed:
        properties.setdefault(name, {})
    arguments = [f"{rule}_{index}" + ("" if name in needed else "?") for index, name in enumerate(properties)]
    yield " ".join([f"{rule}:", _literal(tool.name), *arguments])
    for index, (name, property_) in enumerate(properties.items()):
        yield f"{rule}_{index}: <arg_key> {_literal(name)} </arg_key> <arg_value> {rule}_{index}_value </arg_value>"
        yield f"{rule}_{index}_value: {_value_rule(property_, schema, is_lenient=not tool.is_strict)}"


def _is_folded(tool: Tool, schema: Mapping[str, Any]) -> bool:
    """Whether the arguments are not written out one by one, so that nothing can hold them. Raises InvalidRequest where that must be."""
    folded = next((name for name in FOLDING_KEYWORDS if name in schema), None)
    if folded is not None and tool.is_strict:
        raise InvalidRequest(f"the parameters of {tool.name} use {folded}; a strict tool has properties alone", param="tools")
    return folded is not None


def _value_rule(schema: Any, root: Mapping[str, Any], *, is_lenient: bool) -> str:
    """A value as GLM writes it: a string raw, anything else as JSON."""
    types = find_types(schema, root) or STRING
    if "string" in types:
        return _string_rule(schema) if types == STRING and isinstance(schema, Mapping) else _mixed_rule(schema)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return _json_rule({**shared, **schema}, is_lenient=is_lenient)


def _string_rule(schema: Mapping[str, Any]) -> str:
    """Raw text within the schema's bounds; a `format` is not enforced."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        return _choices(choices)
    if isinstance(schema.get("pattern"), str):
        pattern = schema["pattern"]
        before, after = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
        return f"/{before}(?:{inside_slashes(pattern.removeprefix('^').removesuffix('$'))}){after}/"
    least, most = _bound(schema.get("minLength")), _bound(schema.get("maxLength"))
    if least is None and most is None:
        return ANY_TEXT
    return f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"


def _bound(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPETITION else None


def _mixed_rule(schema: Any) -> str:
    """Text that may be a string or something else: whatever is no JSON of the other types is read as a string."""
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list) and schema["enum"]:
        return _choices(schema["enum"])
    return ANY_TEXT


def _choices(values: list[Any]) -> str:
    return " | ".join(_literal(value if isinstance(value, str) else json.dumps(value)) for value in values)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _json_rule(schema: Any, *, is_lenient: bool) -> str:
    return f"%json {json.dumps(with_options(schema, is_lenient=is_lenient))}"
