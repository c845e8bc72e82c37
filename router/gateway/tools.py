"""The tools of a chat request: what a client may define, and which of them the model may or must call. Untrusted until checked here.

Knows: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Tools stay as the client wrote them, since the template prints them in
that order. Does not know how calls are read (`turn_parser.py`) or enforced (`tool_grammar.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from kv_transfer.errors import InvalidRequest, UnsupportedParameter
from router.gateway.answer import CallFormat
from router.gateway.tool_values import ArgumentTypes, TooManySchemas, TypeFinder

MAX_TOOLS = 512
MAX_TOOL_BYTES = 262_144
TOO_MANY_SCHEMAS = "the schemas of these tools are too large to read; use fewer or simpler ones"
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


@unique
class ToolChoice(Enum):
    """Whether the answer may hold calls. REQUIRED: at least one; a named tool is REQUIRED of that one alone."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. definition: as the client wrote it. parameters: its JSON schema, None where it takes none. types: of its arguments."""

    name: str
    definition: dict[str, Any]
    parameters: Mapping[str, Any] | None
    is_strict: bool
    types: ArgumentTypes


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. callable_tools: those that a forced call may name."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    callable_tools: tuple[Tool, ...] = ()
    is_parallel: bool = True

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """What the template is given."""
        return [tool.definition for tool in self.tools]

    def call_format(self) -> CallFormat | None:
        """How calls are read; None where their tags are text."""
        if self.choice is ToolChoice.NONE:
            return None
        types = {tool.name: tool.types for tool in self.tools}
        return CallFormat(types, max_calls=0 if self.is_parallel else 1)


def read_tools(tools: list[Any] | None, choice: Any, is_parallel: bool | None) -> ToolUse:
    """Check the three fields. Raises InvalidRequest, UnsupportedParameter naming the place."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return ToolUse()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools in one request; at most {MAX_TOOLS}", param="tools")
    found: dict[str, Tool] = {}
    finder = TypeFinder()
    for index, definition in enumerate(tools):
        tool = _read_tool(definition, f"tools.{index}", finder)
        if tool.name in found:
            raise InvalidRequest(f"two tools are named {tool.name!r}", param=f"tools.{index}.function.name")
        found[tool.name] = tool
    how, name = _read_choice(choice)
    if name is not None and name not in found:
        raise InvalidRequest(f"tool_choice names {name[:128]!r}, which is none of the tools", param="tool_choice.function.name")
    everything = tuple(found.values())
    return ToolUse(everything, how, everything if name is None else (found[name],), is_parallel=is_parallel is not False and name is None)


def _read_tool(definition: Any, path: str, finder: TypeFinder) -> Tool:
    if not isinstance(definition, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    if definition.get("type") != "function":
        raise UnsupportedParameter('only tools of type "function" can be called', param=f"{path}.type")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function must be an object", param=f"{path}.function")
    name, path = function.get("name"), f"{path}.function"
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequest("a tool's name has 1 to 128 letters, digits, dots, dashes and underscores", param=f"{path}.name")
    parameters = function.get("parameters")
    for field, kind, words in (("parameters", dict, "a JSON schema"), ("description", str, "text"), ("strict", bool, "true or false")):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise InvalidRequest(f"{field} must be {words}", param=f"{path}.{field}")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise InvalidRequest("the parameters of a function are an object", param=f"{path}.parameters.type")
    try:
        num_bytes = len(json.dumps(definition))
    except RecursionError:
        raise InvalidRequest("it is nested too deeply", param=path) from None
    if num_bytes > MAX_TOOL_BYTES:
        raise InvalidRequest(f"the tool is longer than {MAX_TOOL_BYTES} bytes; shorten it", param=path)
    try:
        types = ArgumentTypes(parameters, finder)
    except TooManySchemas:
        raise InvalidRequest(TOO_MANY_SCHEMAS, param=f"{path}.parameters") from None
    return Tool(name, definition, parameters, function.get("strict") is True, types)


def _read_choice(choice: Any) -> tuple[ToolChoice, str | None]:
    if choice is None:
        return ToolChoice.AUTO, None
    if isinstance(choice, str) and choice in {item.value for item in ToolChoice}:
        return ToolChoice(choice), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice.REQUIRED, name
        raise InvalidRequest("the tool's name is missing", param="tool_choice.function.name")
    raise InvalidRequest(
        'tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}', param="tool_choice"
    )
