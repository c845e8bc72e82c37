"""What a forced tool call must look like, as a grammar in llguidance's dialect of Lark, with GLM's tags as special tokens.

Knows: how the format and the tools' schemas become rules. Does not know whether they are good ones (`grammar_checker.py` asks), or where
in an output the grammar begins (`GrammarSpec`).

    start: call+            call: <tool_call> (tool_0 | tool_1) </tool_call>
    tool_0: "name" <arg_key> "city" </arg_key> <arg_value> value_0 </arg_value> ...
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kv_transfer.errors import InvalidRequest
from kv_transfer.grammar import MAX_GRAMMAR_BYTES
from router.gateway.grammar_fields import AskedGrammar, Notation
from router.gateway.tool_value_rules import ValueRules, json_rule, literal
from router.gateway.tool_values import TooManySchemas
from router.gateway.tools import TOO_MANY_SCHEMAS, Tool, ToolChoice, ToolUse

FOLDING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")
COMPLAINT = re.compile(r"at (?P<line>[0-9]+)\([0-9]+\): (?P<reason>.*?)(?: [0-9]+ \| .*)?$", re.DOTALL)
"""The library's, about a line of a grammar, which it then quotes."""
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
        return write_grammar(use, "tool_choice", checks_all=True)
    if answer is not None:
        return _with_answer(use, answer)
    if any(tool.is_strict for tool in use.tools):
        return write_grammar(use, "tools", checks_all=False)
    return None


def _with_answer(use: ToolUse, answer: AskedGrammar) -> AskedGrammar:
    if answer.notation is not Notation.JSON_SCHEMA:
        raise InvalidRequest(f"{answer.param} cannot be combined with tools; only a JSON schema can", param=answer.param)
    asked = write_grammar(use, answer.param, checks_all=False, otherwise=" | answer")
    text = f"{asked.text}\nanswer: {json_rule(json.loads(answer.text), is_lenient=answer.is_lenient)}"
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _too_long(answer.param)
    return replace(asked, text=text)


def _too_long(param: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar of these tools is longer than {MAX_GRAMMAR_BYTES} bytes; use fewer or smaller ones", param=param)


def write_grammar(use: ToolUse, param: str, *, checks_all: bool, otherwise: str = "") -> AskedGrammar:
    """The rules. checks_all: hold every tool to its schema, as far as it can be; else only those that say `strict`.

    otherwise: what may stand instead of the calls. Raises InvalidRequest naming the tool.
    """
    tools = use.callable_tools
    rules = [f"start: call{'+' if use.is_parallel else ''}{otherwise}"]
    rules.append("call: <tool_call> (" + " | ".join(f"tool_{index}" for index in range(len(tools))) + ") </tool_call>")
    values, notes = ValueRules(), list[str]()
    num_bytes = 0
    for index, tool in enumerate(tools):
        try:
            for line in _tool_rules(f"tool_{index}", tool, values, is_free=not (checks_all or tool.is_strict)):
                num_bytes += len(line.encode()) + 1
                if num_bytes > MAX_GRAMMAR_BYTES:  # before more are made: each may be as long as its tool
                    raise _too_long("tools")
                rules.append(line)
        except TooManySchemas:
            raise InvalidRequest(TOO_MANY_SCHEMAS, param=parameters_path(use, index)) from None
        found = values.take_notes()
        if not found:
            continue
        path = parameters_path(use, index)
        if tool.is_strict:
            raise InvalidRequest(f"{found[0]} cannot be enforced in the parameters of {tool.name}; leave it out, or strict", param=path)
        notes += [f"{path}: {note}" for note in found]
    text = "\n".join(rules)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _too_long("tools")
    return AskedGrammar(param, Notation.CALLS, text, notes=tuple(notes))


def parameters_path(use: ToolUse, index: int) -> str:
    """Where the client wrote the parameters of a callable tool."""
    names = [tool.name for tool in use.tools]
    return f"tools.{names.index(use.callable_tools[index].name)}.function.parameters"


def name_tool(error: InvalidRequest, use: ToolUse, asked: AskedGrammar | None) -> InvalidRequest:
    """The same refusal in the client's words: the tool whose rule the checker complains of, and nothing of the rules themselves."""
    place = COMPLAINT.search(str(error))
    if asked is None or asked.notation is not Notation.CALLS or place is None:
        return error
    lines = asked.text.split("\n")[: int(place["line"])]
    rule = re.match(r"(?i:tool)_([0-9]+)", lines[-1]) if lines else None
    path = asked.param if rule is None else parameters_path(use, int(rule[1]))
    return InvalidRequest(f"{path} cannot be used: {place['reason']}", param=path)


def _tool_rules(rule: str, tool: Tool, values: ValueRules, *, is_free: bool) -> Iterator[str]:
    schema = tool.parameters or {}
    folded = None if is_free else next((name for name in FOLDING_KEYWORDS if name in schema), None)
    if folded is not None:
        values.note(f"{folded} as a whole")
    if is_free or folded is not None:  # whose arguments are not written out one by one, so that nothing can hold them
        yield f"{rule}: {literal(tool.name)} ({FREE_ARGUMENT})*"
        return
    given, required = schema.get("properties"), schema.get("required")
    properties: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    needed = dict.fromkeys(name for name in required if isinstance(name, str)) if isinstance(required, list) else {}
    properties = {**properties, **{name: {} for name in needed if name not in properties}}
    arguments = [f"{rule}_{index}" + ("" if name in needed else "?") for index, name in enumerate(properties)]
    yield " ".join([f"{rule}:", literal(tool.name), *arguments])
    for index, (name, property_) in enumerate(properties.items()):
        yield f"{rule}_{index}: <arg_key> {literal(name)} </arg_key> <arg_value> {rule}_{index}_value </arg_value>"
        yield from values.write(f"{rule}_{index}_value", property_, schema, is_lenient=not tool.is_strict)
